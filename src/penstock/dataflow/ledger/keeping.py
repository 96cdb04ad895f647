# SPDX-License-Identifier: Apache-2.0
"""Which trajectories stay on disk for people to read, after training needs them no longer.

A group is kept by its number alone, so the kept ones are spread evenly over the whole run and no
commit has to choose. The choice has two limits, which only ever move towards keeping less: a share
of the groups, and a time before which all are released. They are one record of the ledger. Never
touches what training or a reader still needs. `keeper` moves the limits; compaction deletes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import FORGOTTEN_PREFIX

KEPT_KEY = "kept"
"""Key of the ledger's record of what is kept."""
RANKS = 1 << 32
RANK = f"((g.issue % {1 << 31}) * 2654435761 % {RANKS})"
"""Rank of group `g`. Multiplying by the golden ratio spreads consecutive numbers evenly, also over
the groups of each source; SQLite and PostgreSQL compute the same."""
FORGOTTEN = f"EXISTS (SELECT 1 FROM meta m WHERE m.key = '{FORGOTTEN_PREFIX}' || rows.row_id)"
RELEASED = (
    "EXISTS (SELECT 1 FROM freed f LEFT JOIN groups g ON g.group_id = f.group_id "
    "WHERE f.group_id = rows.group_id AND (g.issue IS NULL OR f.at < :since "
    f"OR {RANK} >= :limit OR {FORGOTTEN}))"
)
"""Condition on a row of `rows`: training does not need it, and it is not kept for reading."""
KEPT = (
    "FROM freed f JOIN groups g ON g.group_id = f.group_id JOIN rows ON rows.group_id = f.group_id "
    f"{{columns}} WHERE f.at >= :since AND {RANK} < :limit"
)
COLUMNS = "JOIN columns c ON c.space = rows.space AND c.row_id = rows.row_id"
KEPT_ROW_BYTES = f"SELECT coalesce(sum(rows.length), 0) {KEPT.format(columns='')}"
KEPT_COLUMN_BYTES = f"SELECT coalesce(sum(c.length), 0) {KEPT.format(columns=COLUMNS)}"
KEPT_BY_TIME = (
    f"SELECT f.at, sum(rows.length) {KEPT.format(columns='')} GROUP BY f.at ORDER BY f.at"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpec:
    """What a run wants to keep for reading, in one ledger."""

    max_bytes: int
    share: float = 1.0
    """Of the groups."""
    is_window: bool = False
    """Above `max_bytes`, release the oldest groups; otherwise half of the share."""
    min_free_bytes: int = 0
    """Free disk below which work is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The groups that are kept after they were freed."""

    limit: int
    """Those with a rank below it, of RANKS."""
    since: float = 0.0
    """Those freed at or after this time."""

    @property
    def share(self) -> float:
        return self.limit / RANKS


NOTHING = Kept(limit=0)
"""Freed payload may be deleted at once."""


def read_kept(tables: Tables) -> Kept:
    """What this ledger has kept so far; all, if it never released a group early."""
    value = tables.scalar("SELECT value FROM meta WHERE key = :key", key=KEPT_KEY)
    return Kept(limit=RANKS) if value is None else msgspec.json.decode(value, type=Kept)


def current_kept(tables: Tables, spec: KeepSpec | None) -> Kept:
    """What is kept from now on: never more than before."""
    if spec is None:
        return NOTHING
    saved = read_kept(tables)
    return replace(saved, limit=min(saved.limit, round(spec.share * RANKS)))


def kept_bytes(tables: Tables, kept: Kept) -> int:
    """Payload of freed groups that is kept. Reads every kept row, so call it from a thread."""
    values = {"since": kept.since, "limit": kept.limit}
    return sum(int(tables.scalar(q, **values)) for q in (KEPT_ROW_BYTES, KEPT_COLUMN_BYTES))
