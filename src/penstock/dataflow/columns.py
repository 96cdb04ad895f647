# SPDX-License-Identifier: Apache-2.0
"""Write-once columns: what stands for a row and a name, and the one way a cell becomes a record.

Answers from SQL and from what is decided but not yet on disk, so that two writers in one group
commit cannot both be first. Decides nothing about who may write.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from blake3 import blake3

from penstock.dataflow.protocol import DeliveryStatus
from penstock.dataflow.records import ColumnRecord, Erasure, ItemRecord, Journal
from penstock.dataflow.segments import Location
from penstock.dataflow.tables import Tables
from penstock.errors import BadRequest
from penstock.types import RowId

K = TypeVar("K")
V = TypeVar("V")
TRAIN = "train"
"""The space of the rollout rows; users read it and never put into it."""
TURNS = "turns"
REWARD = "reward"
ADMITTED = "admitted"
"""Written by the service when some policy admits a row: the time of it."""
RESERVED = frozenset({TURNS, ADMITTED})
MAX_INLINE_BYTES = 1 << 20
"""A longer value goes by claim check: the blob first, then a column that names it."""
MAX_DETAIL = 2_000
PART = 500
"""Keys in one SQL condition."""
COLUMN_BYTES = 64
"""What a column of a user's space counts beside its value: its record costs too."""
USED = (
    "SELECT space, coalesce(sum(length), 0) + :each * count(*) FROM columns "
    "WHERE space != :train GROUP BY space"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One column of one row, ready to be stored: a number, bytes, a blob, or a failure."""

    name: str
    digest: str
    """Of the value; what makes a second write a duplicate or a conflict."""
    value: float | None = None
    payload: bytes | None = None
    blob: str = ""
    length: int = 0
    failed: str = ""
    detail: str = ""


def number_cell(name: str, value: float) -> Cell:
    return Cell(name=name, digest=blake3(struct.pack("<d", value)).hexdigest(), value=value)


def bytes_cell(name: str, payload: bytes) -> Cell:
    if len(payload) > MAX_INLINE_BYTES:
        raise BadRequest(
            f"column {name!r} has {len(payload)} bytes; above {MAX_INLINE_BYTES} put it as a blob "
            "(PUT /v1/blobs/DIGEST) and name the blob instead"
        )
    digest = blake3(payload).hexdigest()
    return Cell(name=name, digest=digest, payload=payload, length=len(payload))


def blob_cell(name: str, digest: str, length: int) -> Cell:
    return Cell(name=name, digest=digest, blob=digest, length=length)


def failed_cell(name: str, kind: str, detail: str = "") -> Cell:
    return Cell(name=name, digest="", failed=kind, detail=detail[:MAX_DETAIL])


def compare(standing: ColumnRecord, cell: Cell) -> tuple[DeliveryStatus, str]:
    """The first write stays: the same again is a duplicate, anything else a conflict."""
    if (standing.digest, standing.failed) == (cell.digest, cell.failed):
        return DeliveryStatus.DUPLICATE, ""
    stands = f"failed({standing.failed})" if standing.failed else f"a value {standing.digest[:12]}"
    where = f"column {cell.name!r} of row {standing.row_id!r}"
    return DeliveryStatus.CONFLICT, f"{where} is {stands}, written by {standing.writer}"


class Recent(Generic[K, V]):
    """What is decided and maybe not on disk yet. `cut` before a flush and `release` after it drop
    exactly what that flush made durable."""

    def __init__(self) -> None:
        self._young: dict[K, V] = {}
        self._old: dict[K, V] = {}

    def __setitem__(self, key: K, value: V) -> None:
        self._young[key] = value

    def get(self, key: K) -> V | None:
        return self._young.get(key) or self._old.get(key)

    def cut(self) -> None:
        self._old.update(self._young)
        self._young = {}

    def release(self) -> None:
        self._old = {}

    def drop(self, is_gone: Callable[[K], bool]) -> None:
        self._young = {key: value for key, value in self._young.items() if not is_gone(key)}
        self._old = {key: value for key, value in self._old.items() if not is_gone(key)}


class Columns:
    def __init__(
        self, tables: Tables, journal: Journal, place: Callable[[bytes], Location]
    ) -> None:
        self._tables = tables
        self._journal = journal
        self._place = place
        self.used_bytes: dict[str, int] = {}
        """By space, of those that users put into."""
        self._recent: Recent[tuple[str, RowId, str], ColumnRecord] = Recent()
        self._items: Recent[tuple[str, RowId], ItemRecord] = Recent()
        self._gone: Recent[tuple[str, RowId], bool] = Recent()

    def restore(self) -> None:
        found = self._tables.rows(USED, each=COLUMN_BYTES, train=TRAIN)
        self.used_bytes = {str(space): int(used) for space, used in found}

    # --- what stands --------------------------------------------------------------------------

    def standing(
        self, space: str, row_ids: Sequence[RowId], names: Iterable[str]
    ) -> dict[tuple[RowId, str], ColumnRecord]:
        wanted = sorted(set(names))
        found: dict[tuple[RowId, str], ColumnRecord] = {}
        if not wanted:
            return found
        for start in range(0, len(row_ids), PART):
            ids = list[str](row_ids[start : start + PART])
            where = "space = :space AND row_id IN :ids AND name IN :names"
            for record in self._tables.read(
                ColumnRecord, where, space=space, ids=ids, names=wanted
            ):
                found[record.row_id, record.name] = record
        for row_id in row_ids:
            for name in wanted:
                recent = self._recent.get((space, row_id, name))
                if recent is not None:
                    found[row_id, name] = recent
        return found

    def items(self, space: str, keys: Sequence[RowId]) -> dict[RowId, ItemRecord]:
        """Rows of these keys that users put."""
        found: dict[RowId, ItemRecord] = {}
        for start in range(0, len(keys), PART):
            ids = list[str](keys[start : start + PART])
            where = "space = :space AND row_id IN :ids"
            for record in self._tables.read(ItemRecord, where, space=space, ids=ids):
                found[record.row_id] = record
        for key in keys:
            recent = self._items.get((space, key))
            if recent is not None:
                found[key] = recent
        return found

    def is_gone(self, space: str, row_id: RowId) -> bool:
        """Forgotten a moment ago, while tables may still show it."""
        return self._gone.get((space, row_id)) is not None

    # --- what becomes of it -------------------------------------------------------------------

    def land(self, space: str, row_id: RowId, cell: Cell, writer: str, now: float) -> ColumnRecord:
        """Store a cell whose place is free; whether it is, the caller knows."""
        where = Location(segment=0, offset=0, length=cell.length)
        if cell.payload is not None:
            where = self._place(cell.payload)
        record = ColumnRecord(
            space=space,
            row_id=row_id,
            name=cell.name,
            failed=cell.failed,
            value=cell.value,
            digest=cell.digest,
            segment=where.segment,
            offset=where.offset,
            length=where.length,
            writer=writer,
            at=now,
            blob=cell.blob,
            detail=cell.detail,
        )
        self._journal(record)
        self._recent[space, row_id, cell.name] = record
        if space != TRAIN:
            used = self.used_bytes.get(space, 0)
            self.used_bytes[space] = used + where.length + COLUMN_BYTES
        return record

    def add_item(self, record: ItemRecord) -> None:
        self._journal(record)
        self._items[record.space, record.row_id] = record

    def forget(self, space: str, row_id: RowId) -> None:
        self._gone[space, row_id] = True

    def clear(self, space: str) -> None:
        """Nothing may be put into this space until this is durable: a commit erases after it has
        written every record of its group."""
        self._recent.drop(lambda key: key[0] == space)
        self._items.drop(lambda key: key[0] == space)
        self.used_bytes.pop(space, None)
        for kind in (ColumnRecord, ItemRecord):
            self._journal(Erasure(kind=kind, where="space = :space", values={"space": space}))

    def cut(self) -> None:
        for recent in (self._recent, self._items, self._gone):
            recent.cut()

    def release(self) -> None:
        """All that was decided before `cut` is durable; the tables answer for it."""
        for recent in (self._recent, self._items, self._gone):
            recent.release()
