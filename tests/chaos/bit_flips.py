# SPDX-License-Identifier: Apache-2.0
"""One flipped bit in one file of a ledger, and what the ledger's own readers make of it.

The truth is what the undamaged ledger says. Damage may be refused with an error, or contained to
the record it hit; a record that reads differently, or is missing, without a word is a broken
promise."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from blake3 import blake3
from msgspec import structs
from tests.chaos.ack_log import Acknowledged
from tests.chaos.load_generator import POLICY, PartitionCallers, read_batch
from tests.chaos.processes import FailedToStart, Services

from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.segments import Location
from penstock.dataflow.ledger.tables import Tables, open_tables
from penstock.dataflow.records import RECORDS, RowRecord
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    PolicyState,
)
from penstock.errors import StoreError, WireError
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Role
from penstock.wire.client import AsyncServiceClient
from penstock.wire.codec import encode

T = TypeVar("T")

SAID_SO = (
    StoreError,
    sqlite3.DatabaseError,
    msgspec.MsgspecError,
    ValueError,
    TypeError,
)
"""The database, or a value that cannot be what it was: the reader stops instead of serving it."""
Key = tuple[Any, ...]


class Verdict(StrEnum):
    HARMLESS = "harmless"
    """Everything reads as before: free space, or a copy of something that is kept elsewhere."""
    REFUSED = "refused"
    """The ledger says that it is damaged."""
    CONTAINED = "contained"
    """One record is gone by name, all others read as before."""
    MISSED = "missed by an index"
    """Every record reads as before, but a look through a damaged index finds fewer of them."""
    TORN = "taken for a torn write"
    """Only the last commit before the crash is gone: a flipped bit in it looks like a write that
    was never finished, and so was never acknowledged."""
    SILENT = "silent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    file: Path
    offset: int
    bit: int

    def __str__(self) -> str:
        return f"{self.file.name} byte {self.offset} bit {self.bit}"


def draw(files: list[Path], rng: random.Random) -> Flip:
    file = rng.choice(files)
    return Flip(file=file, offset=rng.randrange(file.stat().st_size), bit=rng.randrange(8))


def flip_bit(flip: Flip) -> None:
    with flip.file.open("r+b") as file:
        file.seek(flip.offset)
        byte = file.read(1)[0]
        file.seek(flip.offset)
        file.write(bytes([byte ^ (1 << flip.bit)]))


@contextmanager
def flipped(flip: Flip) -> Generator[None]:
    """For as long as it takes to look; nothing that only reads changes the file."""
    flip_bit(flip)
    try:
        yield
    finally:
        flip_bit(flip)


# --- payload ------------------------------------------------------------------------------------


def read_payloads(folder: Path, rows: list[RowRecord]) -> dict[str, bytes | None]:
    """By row id; None: told to be damaged."""
    found: dict[str, bytes | None] = {}
    for row in rows:
        location = Location(segment=row.segment, offset=row.offset, length=row.length)
        found[row.row_id] = None
        with suppress(StoreError):
            found[row.row_id] = segments.read(folder / "segments", location)
    return found


def judge_payloads(
    found: Mapping[str, bytes | None], truth: Mapping[str, bytes | None]
) -> tuple[Verdict, str]:
    gone = [row_id for row_id, payload in found.items() if payload is None]
    for row_id, payload in truth.items():
        if row_id not in gone and found[row_id] != payload:
            return Verdict.SILENT, f"{row_id} has other bytes"
    if len(gone) > 1:
        return Verdict.SILENT, f"one bit took {len(gone)} records with it"
    return (Verdict.CONTAINED, gone[0]) if gone else (Verdict.HARMLESS, "")


# --- records ------------------------------------------------------------------------------------


Records = dict[str, dict[Key, Any]]
"""By table, then by key."""


def read_records(tables: Tables) -> Records:
    found: Records = {}
    for kind in RECORDS:
        records = tables.read(cast(Any, kind))
        key = attrgetter(kind.KEY[0], *kind.KEY)  # the first once more, so that it is a tuple
        found[kind.TABLE] = {key(record): record for record in records}
        if len(found[kind.TABLE]) != len(records):
            raise StoreError(f"table {kind.TABLE} holds a key twice")
    return found


def _misses(tables: Tables, rows: Iterable[RowRecord]) -> bool:
    """Do the service's two ways to look for rows, by id and by group, find less than all?"""
    known = {row.row_id for row in rows}
    for column in ("row_id", "group_id"):
        wanted = sorted({str(getattr(row, column)) for row in rows})
        found = tables.read(RowRecord, f"{column} IN :wanted", wanted=wanted)
        if {row.row_id for row in found} != known:
            return True
    return False


def judge_start(
    folder: Path, truth: Records, before_last: Records | None = None
) -> tuple[Verdict, str]:
    """As a start does, with what it repairs and refuses."""
    try:
        tables = open_tables(folder)
        try:
            tables.verify()
            found = read_records(tables)
            misses = _misses(tables, found[RowRecord.TABLE].values())
        finally:
            tables.close()
    except SAID_SO as error:
        return Verdict.REFUSED, f"{type(error).__name__}: {str(error)[:80]}"
    if found == before_last:
        return Verdict.TORN, ""
    for table, records in truth.items():
        if _in_place(found[table], records) != records:
            kept = sum(1 for key in records if key in found[table])
            return Verdict.SILENT, f"{table}: {kept} of {len(records)} keys, or other values"
    return (Verdict.MISSED, "") if misses else (Verdict.HARMLESS, "")


def _in_place(found: dict[Key, Any], truth: Mapping[Key, Any]) -> dict[Key, Any]:
    """A wrong place gives no bytes, or bytes of another digest: whoever reads a row holds what lies
    there against its digest. So where a row lies does not count."""
    return {
        key: structs.replace(record, segment=truth[key].segment, offset=truth[key].offset)
        if key in truth and isinstance(record, RowRecord)
        else record
        for key, record in found.items()
    }


def ends_of_commits(log: bytes) -> list[int]:
    """Of a write-ahead log of SQLite."""
    step = 24 + int.from_bytes(log[8:12], "big")
    frames = range(32, len(log) - step + 1, step)
    return [
        at + step
        for at in frames
        if log[at + 4 : at + 8] != bytes(4) and log[at + 8 : at + 16] == log[16:24]
    ]


def without_last_commit(log: bytes) -> bytes:
    return log[: ends_of_commits(log)[-2]]


# --- the whole service --------------------------------------------------------------------------


async def judge_service(
    services: Services, folder: RunFolder, acked: Acknowledged
) -> tuple[Verdict, str]:
    """Start on the damaged ledger and ask for all that was promised, as a trainer does."""
    for name in services.names:
        services.start(name)
    try:
        for name in services.names:
            await services.wait_ready(name)
        reader = Reader(folder)
        try:
            return await reader.judge(acked)
        finally:
            await reader.close()
    except FailedToStart as error:
        return Verdict.REFUSED, str(error)[-80:]
    finally:
        for name in services.names:
            services.kill(name)


class Reader:
    """A trainer's eyes: the policy's state, every manifest and every row."""

    def __init__(self, folder: RunFolder) -> None:
        token = folder.token(folder.read_config().name, Role.TRAINER, ttl_s=3600.0)
        self._caller = AsyncServiceClient(folder.endpoints().dataflow, token)
        self._far = PartitionCallers(token)

    async def close(self) -> None:
        await self._caller.close()
        await self._far.close()

    async def _call(self, method: str, path: str, body: object, kind: type[T]) -> T:
        return await self._caller.call(method, path, body, kind, deadline_s=0.0)

    async def judge(self, acked: Acknowledged) -> tuple[Verdict, str]:
        gone = 0
        try:
            state = await self._call("GET", f"/v1/policies/{POLICY}", None, PolicyState)
            committed = [key for key in acked.commits if key[1] == state.incarnation]
            last = max((seq for seq, _ in committed), default=0)
            if state.seq < last:
                return Verdict.SILENT, f"at batch {state.seq} after a commit of {last}"
            for seq, digest in acked.batches.items():
                body = BatchRequest(
                    consumer=POLICY, seq=seq, incarnation=state.incarnation, wait_s=0.0
                )
                answer = await self._call("POST", "/v1/batches", body, BatchAnswer)
                if answer.manifest is None or answer.digest != digest:
                    return Verdict.SILENT, f"batch {seq} is another one"
                if blake3(encode(answer.manifest)).hexdigest() != digest:
                    return Verdict.SILENT, f"batch {seq} has other content"
                rows = await read_batch(self._caller, self._far, seq)
                payloads = {row.row_id: row.payload for row in rows}
                for member in answer.manifest.rows:
                    payload = payloads[member.row_id]
                    gone += payload is None
                    if payload is not None and blake3(payload).hexdigest() != member.digest:
                        return Verdict.SILENT, f"{member.row_id} has other bytes"
        except WireError as error:
            return Verdict.REFUSED, str(error)[:80]
        return (Verdict.CONTAINED, f"{gone} rows") if gone else (Verdict.HARMLESS, "")
