# SPDX-License-Identifier: Apache-2.0
"""What lies in a run folder, read once and as of one moment.

Owns the auditor's own idea of the tables, the manifests, the acknowledgement logs and the run
file. Judges nothing: a value of the wrong type is the only thing refused here. The records are
msgspec Structs, not dataclasses, because those check a table row's types while they take it.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from penstock.audit.payloads import Content, Segments
from penstock.errors import StoreError

FORMAT = 1
T = TypeVar("T")
TableRow = TypeVar("TableRow", bound="Table")
Pair = tuple[int, int]
"""A version: (incarnation, number)."""


class Table(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of one table; the fields are the columns read, in this order."""


class Group(Table, frozen=True, gc=False):
    group_id: str
    partition: int
    issue: int
    source: str
    ordinal: int
    task_key: str
    num_slots: int
    state: str


class Lease(Table, frozen=True, gc=False):
    group_id: str
    slot: int
    epoch: int
    attempt: int
    node_id: str
    ended: str


class Row(Table, frozen=True, gc=False):
    row_id: str
    group_id: str
    slot: int
    epoch: int
    node_id: str
    digest: str
    segment: int
    offset: int
    length: int
    outcome: str
    reward: float | None
    sampled: str
    versions: str


class Fate(Table, frozen=True, gc=False):
    consumer: str
    group_id: str
    state: str
    reason: str
    seq: int


class Batch(Table, frozen=True, gc=False):
    consumer: str
    seq: int
    incarnation: int
    trains_from: int
    num_groups: int
    num_rows: int
    digest: str
    manifest: bytes
    reward_mean: float
    staleness_mean: float
    staleness_max: int
    sealed_at: float

    @property
    def name(self) -> str:
        return f"{self.consumer}.{self.seq}"


class Commit(Table, frozen=True, gc=False):
    consumer: str
    seq: int
    incarnation: int
    number: int
    skipped: str


class Fork(Table, frozen=True, gc=False):
    """One incarnation: the life of a trainer, and where it starts from."""

    policy: str
    incarnation: int
    number: int
    seq: int


class Version(Table, frozen=True, gc=False):
    policy: str
    incarnation: int
    number: int
    manifest_digest: str
    weights_digest: str
    at: float

    @property
    def name(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.number}"


class Source(Table, frozen=True, gc=False):
    name: str
    next_ordinal: int


class MemberSummary(msgspec.Struct, frozen=True, gc=False):
    """A row as a manifest names it."""

    row_id: str
    digest: str
    reward: float
    outcome: str
    sampled: dict[str, int]
    versions: dict[str, list[Pair]]


class GroupSummary(msgspec.Struct, frozen=True):
    group_id: str
    task_key: str
    rows: tuple[MemberSummary, ...]


class Manifest(msgspec.Struct, frozen=True):
    consumer: str
    seq: int
    trains_from: int
    groups: tuple[GroupSummary, ...]


class _Training(msgspec.Struct, frozen=True):
    max_staleness: int


class _Model(msgspec.Struct, frozen=True):
    training: _Training | None = None


class _Dataflow(msgspec.Struct, frozen=True):
    closing: Any = "complete"


class RunFile(msgspec.Struct, frozen=True):
    """Of config.yaml, only what the laws are measured by."""

    models: dict[str, _Model]
    training: _Training
    dataflow: _Dataflow = _Dataflow()

    def max_staleness(self, policy: str) -> int:
        model = self.models.get(policy, _Model())
        return (model.training or self.training).max_staleness

    @property
    def may_close_without_all(self) -> bool:
        return isinstance(self.dataflow.closing, dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All of it, of one moment; acknowledgements may only be older."""

    run_file: RunFile
    acknowledged: frozenset[str]
    groups: dict[str, Group]
    leases: list[Lease]
    """In order of group, slot and epoch."""
    rows: dict[str, Row]
    contents: dict[str, Content]
    """By row id: what the payload says, as far as it can be read."""
    fates: list[Fate]
    batches: list[Batch]
    """In order of consumer and seq."""
    manifests: dict[str, Manifest]
    """By the batch's name; damaged ones are missing."""
    commits: list[Commit]
    forks: list[Fork]
    versions: list[Version]
    sources: list[Source]
    weights: Path

    def rows_by_group(self) -> dict[str, list[Row]]:
        found: defaultdict[str, list[Row]] = defaultdict(list)
        for row in self.rows.values():
            found[row.group_id].append(row)
        return found


def read(run_dir: Path) -> Evidence:
    """Acknowledgements first: whatever was acknowledged before the tables are read is in them."""
    run_file = _read_run_file(run_dir / "config.yaml")
    acknowledged = frozenset(_read_acknowledged(run_dir / "acks"))
    connection = _connect(run_dir / "ledger" / "ledger.db")
    try:
        connection.execute("BEGIN")
        _check_format(connection)
        rows = _table(connection, Row, "rows", "segment, offset")
        batches = _table(connection, Batch, "batches", "consumer, seq")
        groups = _table(connection, Group, "groups", "issue")
        evidence = Evidence(
            run_file=run_file,
            acknowledged=acknowledged,
            groups={group.group_id: group for group in groups},
            leases=_table(connection, Lease, "leases", "group_id, slot, epoch"),
            rows={row.row_id: row for row in rows},
            contents=_read_contents(run_dir / "ledger" / "segments", rows),
            fates=_table(connection, Fate, "fates", "consumer, group_id"),
            batches=batches,
            manifests={b.name: m for b in batches if (m := _manifest(b)) is not None},
            commits=_table(connection, Commit, "commits", "consumer, incarnation, seq"),
            forks=_table(connection, Fork, "incarnations", "policy, incarnation"),
            versions=_table(connection, Version, "versions", "policy, incarnation, number"),
            sources=_table(connection, Source, "sources", "name"),
            weights=run_dir / "weights",
        )
    finally:
        connection.close()
    return evidence


def decode_map(text: str, kind: type[T], known: dict[str, T]) -> T | None:
    """A JSON column; the few distinct texts of a run are decoded once."""
    if text not in known:
        try:
            known[text] = msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError:
            return None
    return known[text]


def _connect(path: Path) -> sqlite3.Connection:
    if not path.is_file():
        raise StoreError(
            f"there is no ledger at {path}; give the folder of a run that was started, "
            "OUTPUT_DIR/NAME of its config"
        )
    # Without a write-ahead log nobody has the ledger open, and none need be made to read it.
    is_open = path.with_name(path.name + "-wal").exists()
    mode = "mode=ro" if is_open else "mode=ro&immutable=1"
    return sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, isolation_level=None)


def _check_format(connection: sqlite3.Connection) -> None:
    try:
        found = connection.execute("SELECT value FROM meta WHERE key = 'format'").fetchone()
    except sqlite3.DatabaseError as error:
        raise StoreError(f"the ledger cannot be read: {error}; is this a run folder?") from error
    if found is not None and found[0] != str(FORMAT):
        raise StoreError(
            f"this ledger has format {found[0]}, this auditor reads {FORMAT}; "
            "audit it with the penstock that wrote it"
        )


def _table(
    connection: sqlite3.Connection, kind: type[TableRow], name: str, order: str
) -> list[TableRow]:
    columns = ", ".join(f'"{column}"' for column in kind.__struct_fields__)
    try:
        rows = connection.execute(f"SELECT {columns} FROM {name} ORDER BY {order}").fetchall()
        return msgspec.convert(rows, list[kind])
    except (sqlite3.DatabaseError, msgspec.ValidationError) as error:
        raise StoreError(f"table {name} of the ledger is damaged: {error}") from error


def _read_contents(folder: Path, rows: Iterable[Row]) -> dict[str, Content]:
    with Segments(folder) as segments:
        return {
            row.row_id: segments.content(row.segment, row.offset, row.length, row.digest)
            for row in rows
        }


def _manifest(batch: Batch) -> Manifest | None:
    try:
        return msgspec.msgpack.decode(batch.manifest, type=Manifest)
    except msgspec.MsgspecError:
        return None


def _read_acknowledged(folder: Path) -> Iterable[str]:
    for path in sorted(folder.glob("*")):  # one file per node, whatever it is called
        # A node killed in mid-write leaves half a line; the id on it may be cut.
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        yield from filter(None, whole.decode(errors="replace").split("\n"))


def _read_run_file(path: Path) -> RunFile:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"{path} cannot be read: {error.strerror}; give the folder of a run"
        ) from error
    try:
        return msgspec.convert(yaml.safe_load(text), RunFile)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise StoreError(f"{path} is no resolved run file: {error}") from error
