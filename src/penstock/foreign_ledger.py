# SPDX-License-Identifier: Apache-2.0
"""Reads a ledger that another user may have made: a database whose tables say how SQLite reads it.

Owns every connection for reading. Refuses links, and tables that are more than rows and keys: a
view or a virtual table is a program. Ends a query that does more work, or returns more, than a
ledger of this size can need: pages of a forged one may lead back to themselves.
"""

from __future__ import annotations

import re
import sqlite3
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.errors import StoreError

MIN_STEPS = 10_000_000
STEPS_PER_BYTE = 50
"""Steps of SQLite's machine that a query may take, by the ledger's size on disk: a scan takes less
than one."""
COUNTED_STEPS = 1_000_000
"""Between two looks at their number."""
MIN_RESULT_BYTES = 64 << 20
RESULTS_PER_BYTE = 16
"""How often a query may return what is on disk."""
MIN_NAMED = 1 << 20
"""What records of any ledger may name together, such as slots; a larger one as many as its bytes: a
record of 100 bytes can name 2^63."""
MIN_VALUE_BYTES, MAX_VALUE_BYTES = 1 << 20, 256 << 20
_LONG = (str, bytes)
_NAMES = r'\("\w+"(?:, "\w+")*\)'
_PLAIN = re.compile(
    r'CREATE TABLE "\w+" \((?:"\w+" [A-Z]+(?: NOT NULL)?(?: DEFAULT 0)?, )+'
    rf'PRIMARY KEY {_NAMES}\)(?: WITHOUT ROWID)?|CREATE INDEX \w+ ON "\w+" {_NAMES}'
)
"""The statements of which a ledger's schema consists."""


class ForeignLedger(sqlite3.Connection):
    """One open ledger; `path` is set at the opening."""

    path: Path
    _num_left = 0

    def rows(
        self, query: str, values: Mapping[str, Any] | Sequence[Any] = ()
    ) -> list[tuple[Any, ...]]:
        """All rows of this query; StoreError if it does not end as it would in a real ledger."""
        size = self.bytes_on_disk
        self._num_left = (MIN_STEPS + STEPS_PER_BYTE * size) // COUNTED_STEPS
        left = MIN_RESULT_BYTES + RESULTS_PER_BYTE * size
        found: list[tuple[Any, ...]] = []
        try:
            for row in self.execute(query, values):
                found.append(row)
                left -= sum([len(value) for value in row if value.__class__ in _LONG])
                if left < 0:
                    raise StoreError(f"{self.path} is damaged: a query returns more than it has")
        except sqlite3.Error as error:
            why = "a query takes longer than its size explains" if self._num_left < 0 else error
            raise StoreError(f"{self.path} cannot be read: {why}") from error
        return found

    @property
    def bytes_on_disk(self) -> int:
        return sum(map(_bytes_on_disk, (self.path, _log(self.path))))

    def require_few(self, number: int, what: str) -> None:
        """StoreError if its records name more of these than such a ledger can have."""
        if number > max(MIN_NAMED, self.bytes_on_disk):
            raise StoreError(f"{self.path} is damaged: its records name {number:,} {what}")

    def count(self) -> bool:
        """Whether to interrupt the query."""
        self._num_left -= 1
        return self._num_left < 0

    def check_schema(self) -> None:
        """Before anything is asked about a table: a virtual one is connected by that."""
        for name, sql in self.rows("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL"):
            if not isinstance(sql, str) or not _PLAIN.fullmatch(sql):
                raise StoreError(
                    f"{self.path} has {str(name)[:80]!r}, which no ledger has; it is read only "
                    "without additional tables, views, triggers and indexes"
                )


def open_foreign(path: Path) -> ForeignLedger:
    """Writes no byte, and does not disturb a service that writes the ledger. StoreError if it is
    not one."""
    for one in (path, _log(path), path.with_name(path.name + "-shm")):
        try:
            is_file = stat.S_ISREG(one.lstat().st_mode)
        except FileNotFoundError:
            is_file = one != path
        if not is_file:
            raise StoreError(
                f"{one} is not a regular file, or a link; a ledger is read where it is"
            )
    # Without a write-ahead log no process has the ledger open, and reading must not create one.
    mode = "mode=ro" if _log(path).exists() else "mode=ro&immutable=1"
    uri = f"{path.absolute().as_uri()}?{mode}"
    try:
        opened = sqlite3.connect(
            uri, uri=True, isolation_level=None, check_same_thread=False, factory=ForeignLedger
        )
    except sqlite3.Error as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    try:
        opened.path = path
        longest = min(max(MIN_VALUE_BYTES, _bytes_on_disk(path)), MAX_VALUE_BYTES)
        opened.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, longest)
        opened.set_progress_handler(opened.count, COUNTED_STEPS)
        for setting in ("trusted_schema=OFF", "cell_size_check=ON"):
            opened.rows(f"PRAGMA {setting}")
        opened.check_schema()
    except BaseException:
        opened.close()
        raise
    return opened


def _log(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _bytes_on_disk(path: Path) -> int:
    """Without the holes, which cost nothing."""
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:
        return 0
