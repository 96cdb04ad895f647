# SPDX-License-Identifier: Apache-2.0
"""Loads a reader's unfinished rows from disk, one page at a time in arrival order, and the readers'
saved state after a restart. Reads tables only.

A page looks at no more than SCAN_ROWS rows: it may be empty although unfinished rows follow."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec

from penstock.dataflow.column_records import ReaderRecord
from penstock.dataflow.columns.row_leases import LeaseHolder, Reader, RowLeaseState, RowTrigger
from penstock.dataflow.core.names import ADMITTED, REWARD, TRAIN, TURNS
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import FORGOTTEN_PREFIX
from penstock.types import RowId

SCAN_ROWS = 4_096
"""Rows that one page looks at: most may be finished, or freed before the reader existed."""
_END = 1 << 62
_TABLES = ("rows", "items")
_LEASE_COLUMNS = "t.epoch, t.attempt, t.worker, t.request_id, t.state, t.error"
_UNFINISHED = (
    "LEFT JOIN row_leases t ON t.reader = :reader AND t.row_id = r.row_id AND t.arrival = "
    "r.arrival "
    "WHERE r.space = :space AND r.arrival > :after AND r.arrival <= :through "
    "AND (t.state IS NULL OR t.state IN ('leased', 'waiting'))"
)
_UNSCORED, _SCORED = f'["{TURNS}"]', f'["{TURNS}", "{REWARD}"]'
ROWS = (
    "SELECT r.row_id, r.arrival, r.delivered_at, "
    f"CASE WHEN r.reward IS NULL THEN '{_UNSCORED}' ELSE '{_SCORED}' END, {_LEASE_COLUMNS} "
    f"FROM rows r {_UNFINISHED} "
    "AND r.outcome IN ('completed', 'truncated') "
    "AND NOT EXISTS (SELECT 1 FROM freed f WHERE f.group_id = r.group_id AND (f.at < :declared_at "
    f"OR (:on = '{RowTrigger.ADMITTED}' AND NOT EXISTS (SELECT 1 FROM columns c WHERE "
    f"c.space = r.space AND c.row_id = r.row_id AND c.name = '{ADMITTED}')))) "
    f"AND NOT EXISTS (SELECT 1 FROM meta m WHERE m.key = '{FORGOTTEN_PREFIX}' || r.row_id) "
    "ORDER BY r.arrival LIMIT :num"
)
"""Freed rows wait for their readers, except those freed before the reader existed, and those that
no policy admitted if the reader waits for that."""
ITEMS = (
    f"SELECT r.row_id, r.arrival, r.at, b.names, {_LEASE_COLUMNS} FROM items r "
    f"LEFT JOIN bundles b ON b.space = r.space AND b.arrival = r.bundle {_UNFINISHED} "
    "ORDER BY r.arrival LIMIT :num"
)
THROUGH = (
    "SELECT arrival FROM {table} WHERE space = :space AND arrival > :after ORDER BY arrival "
    "LIMIT 1 OFFSET :num"
)
SPACES = "SELECT name FROM spaces UNION SELECT space FROM readers"
NEWEST = "SELECT arrival FROM {table} WHERE space = :space ORDER BY arrival DESC LIMIT 1"
HELD = "SELECT reader, max(arrival) FROM row_leases WHERE state = 'leased' GROUP BY reader"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRow:
    row_id: RowId
    arrival: int
    at: float
    initial_columns: frozenset[str]
    """Columns delivered with the row; they have no column records."""
    holder: LeaseHolder | None = None
    """The last worker that leased it before the service restarted."""
    is_leased: bool = False
    """That lease has not ended."""


class Page(NamedTuple):
    rows: list[StoredRow]
    through: int
    """Unfinished rows up to this arrival are in this page or earlier ones; 0 for the last page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedReaders:
    """The readers' state as of the last shutdown or crash."""

    readers: tuple[ReaderRecord, ...]
    newest: Mapping[str, int]
    """Arrival of the newest row, by space."""
    held: Mapping[str, int]
    """Arrival of the newest row under lease, by reader."""


def load_page(tables: Tables, reader: Reader, num: int) -> Page:
    """The next rows that this reader has not finished, in order of arrival."""
    terms = reader.terms
    values: dict[str, Any] = {"space": terms.space, "after": reader.loaded_through}
    # Rows become durable in order of arrival, so all up to this one are in the tables.
    ends = (tables.scalar(THROUGH.format(table=t), num=SCAN_ROWS - 1, **values) for t in _TABLES)
    through = min([int(end) for end in ends if end is not None], default=_END)
    values |= {"reader": terms.name, "through": through, "num": num}
    only_rows = {"declared_at": reader.declared_at, "on": terms.on.value}
    rows = tables.rows(ROWS, **values, **only_rows)
    found = [_stored_row(row) for row in (*rows, *tables.rows(ITEMS, **values))]
    found = sorted(found, key=attrgetter("arrival"))[:num]
    if len(found) == num:
        return Page(found, found[-1].arrival)
    return Page(found, 0 if through == _END else through)


@functools.lru_cache(maxsize=1024)
def _names(text: str) -> frozenset[str]:
    """Cached: most bundles have the same columns, so they can share one set."""
    return frozenset(msgspec.json.decode(text, type=list[str]))


def _stored_row(row: tuple[Any, ...]) -> StoredRow:
    row_id, arrival, at, names, epoch, attempt, worker, request_id, state, error = row
    holder = None
    if state is not None:
        holder = LeaseHolder(epoch, attempt, worker, request_id, error=error)
    return StoredRow(
        row_id=row_id,
        arrival=arrival,
        at=at,
        initial_columns=_names(names) if names else frozenset[str](),
        holder=holder,
        is_leased=state == RowLeaseState.LEASED,
    )


def load_saved_readers(tables: Tables) -> SavedReaders:
    """Cost grows with the open leases and spaces, not with the rows ever stored."""
    spaces = {TRAIN, *(str(name) for (name,) in tables.rows(SPACES))}
    held = tables.rows(HELD)
    return SavedReaders(
        readers=tuple(tables.read(ReaderRecord)),
        newest={space: _newest(tables, space) for space in spaces},
        held={str(reader): int(arrival) for reader, arrival in held},
    )


def _newest(tables: Tables, space: str) -> int:
    found = (tables.scalar(NEWEST.format(table=t), space=space) for t in _TABLES)
    return max(int(arrival or 0) for arrival in found)
