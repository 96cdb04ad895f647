# SPDX-License-Identifier: Apache-2.0
"""Records of a run as an iterable that reads on demand, and as a pyarrow or pandas table.

Iterating takes constant memory and may be repeated; each time the files are read again. A
table holds everything. Knows nothing about what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Generic, TypeVar

from penstock.errors import ConfigError

T = TypeVar("T")
ROWS_PER_CHUNK = 4096
_TYPES: Mapping[type[Any], str] = {str: "string", int: "int64", float: "float64", bool: "bool_"}


class Records(Generic[T]):
    """Records that are read while you iterate."""

    def __init__(
        self,
        read: Callable[[], Iterator[T]],
        as_row: Callable[[T], Mapping[str, Any]],
        columns: Mapping[str, type[Any]] | None = None,
    ) -> None:
        """as_row: one record as plain values · columns: their types; None if they differ by run."""
        self._read = read
        self._as_row = as_row
        self._columns = columns

    def __iter__(self) -> Iterator[T]:
        return self._read()

    def to_arrow(self) -> Any:
        """All records as a `pyarrow.Table`, one row each. Needs `penstock-rl[data]`."""
        arrow = _import("pyarrow")
        columns = self._columns or _find_columns(map(self._as_row, self))
        fields = [(name, getattr(arrow, _TYPES[kind])()) for name, kind in columns.items()]
        schema = arrow.schema(fields)
        rows = map(self._as_row, self)
        chunks: list[Any] = []
        while chunk := [*islice(rows, ROWS_PER_CHUNK)]:
            chunks.append(arrow.RecordBatch.from_pylist(chunk, schema=schema))
        return arrow.Table.from_batches(chunks, schema=schema)

    def to_pandas(self) -> Any:
        """All records as a `pandas.DataFrame`, one row each. Needs `penstock-rl[data]`."""
        _import("pandas")
        return self.to_arrow().to_pandas()


def _find_columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, type[Any]]:
    """Every name in any row; a column of mixed numbers is float, any other mix is text."""
    found: dict[str, type[Any]] = {}
    for row in rows:
        for name, value in row.items():
            if value is None:
                found.setdefault(name, float)
                continue
            kind: type[Any] = value.__class__ if value.__class__ in _TYPES else str
            known = found.setdefault(name, kind)
            if known is not kind:
                found[name] = float if {known, kind} <= {int, float} else str
    return found


def _import(name: str) -> Any:
    import importlib

    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ConfigError(
            f"a table needs {name}, which is not installed; pip install 'penstock-rl[data]'"
        ) from None
