# SPDX-License-Identifier: Apache-2.0
"""Changes the files of a run without its service, and adjusts the digests.

Each takes the folder of a run and means home's ledger, or `partition_1(run_dir)` and means that of
partition 1."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crc32c
import msgspec
from blake3 import blake3

Record = dict[str, Any]
ADMITTED_GROUPS = (
    "SELECT g.group_id FROM groups g JOIN fates f ON f.group_id = g.group_id "
    "WHERE g.state = 'closed' AND f.state = 'admitted'"
)
"""Complete groups in no batch: corrupting one affects nothing else."""

LEASE_IS_RUNNING = (
    "(group_id, slot, epoch) NOT IN (SELECT group_id, slot, epoch FROM leases "
    "UNION SELECT group_id, slot, epoch FROM rows)"
)
"""Grants of one slot each whose lease has not ended."""


def partition_1(run_dir: Path) -> Path:
    return run_dir / "ledger" / "p1"


def _folder(run_dir: Path) -> Path:
    return run_dir if run_dir.parent.name == "ledger" else run_dir / "ledger"


@contextmanager
def ledger(run_dir: Path) -> Generator[sqlite3.Connection]:
    connection = sqlite3.connect(_folder(run_dir) / "ledger.db")
    try:
        yield connection
        connection.commit()
    finally:
        connection.close()


def one(run_dir: Path, query: str, *values: object) -> tuple[Any, ...]:
    """The first result; a corruption without a target would prove nothing."""
    with ledger(run_dir) as connection:
        found = connection.execute(query, values).fetchone()
    assert found is not None, f"no victim for {query} {values}"
    return found


def change(run_dir: Path, statement: str, *values: object) -> None:
    with ledger(run_dir) as connection:
        assert connection.execute(statement, values).rowcount > 0, statement


def insert(run_dir: Path, table: str, record: Record) -> None:
    columns = ", ".join(f'"{column}"' for column in record)
    marks = ", ".join("?" * len(record))
    change(run_dir, f"INSERT INTO {table} ({columns}) VALUES ({marks})", *record.values())


def fetch_record(run_dir: Path, table: str, where: str, *values: object) -> Record:
    """One row of a table with all its columns."""
    with ledger(run_dir) as connection:
        connection.row_factory = sqlite3.Row
        query = f"SELECT * FROM {table} WHERE {where} LIMIT 1"
        found = connection.execute(query, values).fetchone()
    assert found is not None, f"no {table} with {where} {values}"
    return dict(found)


def split_grants(run_dir: Path) -> None:
    """One grant per slot, so that they can be changed separately."""
    with ledger(run_dir) as connection:
        connection.execute(
            "INSERT INTO grants WITH RECURSIVE one(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM one "
            "WHERE n < 99) SELECT group_id, slot + n, epoch, 1, attempt, node_id, boot_id, "
            "request_id, granted_at, checksum FROM grants JOIN one ON n < num_slots"
        )
        connection.execute("UPDATE grants SET num_slots = 1")


def running_lease(run_dir: Path) -> Record:
    """A grant of one slot that has not ended."""
    split_grants(run_dir)
    return fetch_record(run_dir, "grants", LEASE_IS_RUNNING)


def last_grant(run_dir: Path, group_id: str, slot: int) -> Record:
    """The newest grant of this slot alone."""
    split_grants(run_dir)
    where = "group_id = ? AND slot = ? ORDER BY epoch DESC"
    return fetch_record(run_dir, "grants", where, group_id, slot)


def end_lease(run_dir: Path, grant: Record, ended: str) -> None:
    """The lease ended without a result."""
    lease = {name: value for name, value in grant.items() if name != "num_slots"}
    insert(run_dir, "leases", lease | {"ended": ended, "ended_at": 0.0, "detail": ""})


def forget_acknowledgement(run_dir: Path, row_id: str) -> None:
    for log in (run_dir / "acks").glob("*.txt"):
        log.write_text(log.read_text().replace(f"{row_id}\n", ""))


# --- payload ------------------------------------------------------------------------------------


def segment(run_dir: Path, number: int) -> Path:
    return _folder(run_dir) / "segments" / f"seg-{number:08d}.dat"


def payload(run_dir: Path, row: Record) -> Record:
    data = segment(run_dir, row["segment"]).read_bytes()
    start = row["offset"] + 12
    return msgspec.msgpack.decode(data[start : start + row["length"]])


def store(run_dir: Path, row: Record, body: Record) -> Record:
    """The row with another, valid payload; not in the ledger yet."""
    data = msgspec.msgpack.encode(body)
    number = 900
    header = struct.pack("<4sII", b"PSR1", len(data), crc32c.crc32c(data))
    segment(run_dir, number).write_bytes(header + data)
    return {
        **row,
        "segment": number,
        "offset": 0,
        "length": len(data),
        "digest": blake3(data).hexdigest(),
    }


def rewrite_payload(run_dir: Path, row_id: str, edit: Callable[[Record], None]) -> None:
    """Replace the content of a row and adjust every digest that covers it."""
    row = fetch_record(run_dir, "rows", "row_id = ?", row_id)
    body = payload(run_dir, row)
    edit(body)
    new = store(run_dir, row, body)
    change(
        run_dir,
        "UPDATE rows SET segment = ?, offset = ?, length = ?, digest = ? WHERE row_id = ?",
        *(new[name] for name in ("segment", "offset", "length", "digest", "row_id")),
    )

    def refresh(manifest: Record) -> None:
        for group in manifest["groups"]:
            for member in group["rows"]:
                if member["row_id"] == row_id:
                    member["digest"] = new["digest"]

    with ledger(run_dir) as connection:
        seqs = [seq for (seq,) in connection.execute("SELECT seq FROM batches")]
    for seq in seqs:
        rewrite_manifest(run_dir, seq, refresh)


def last_turn(edit: Callable[[Record], Any]) -> Callable[[Record], None]:
    return lambda body: edit(body["turns"][-1])


# --- batches ------------------------------------------------------------------------------------


def manifest(run_dir: Path, seq: int) -> Record:
    (body,) = one(run_dir, "SELECT manifest FROM batches WHERE seq = ?", seq)
    return msgspec.msgpack.decode(body)


def rewrite_manifest(run_dir: Path, seq: int, edit: Callable[[Record], None]) -> None:
    """Replace the content of a batch and adjust its digest."""
    content = manifest(run_dir, seq)
    edit(content)
    body = msgspec.msgpack.encode(content)
    rows = [row for group in content["groups"] for row in group["rows"]]
    change(
        run_dir,
        "UPDATE batches SET manifest = ?, digest = ?, num_groups = ?, num_rows = ?, reward_mean = ?"
        " WHERE seq = ?",
        body,
        blake3(body).hexdigest(),
        len(content["groups"]),
        len(rows),
        sum(row["reward"] for row in rows) / len(rows),
        seq,
    )


def row_in_batch(run_dir: Path, seq: int, index: int = 0) -> str:
    rows = [row for group in manifest(run_dir, seq)["groups"] for row in group["rows"]]
    return rows[index]["row_id"]
