# SPDX-License-Identifier: Apache-2.0
"""Rows of Parquet files and of Hugging Face data sets, converted a window at a time.

Owns reading by position: neither is ever in memory as a whole. Where a data set comes from is
decided in `hub`. pyarrow loads here, and only if there is such a source."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from penstock.dataflow.sources.bad_rows import BadRow, BadRowKind
from penstock.errors import ConfigError
from penstock.types import JsonObject

WINDOW_ROWS = 16
"""Rows that are converted at once; tasks are read in order, so most reads are from the window. Few,
since all of them may be the one long value that a small file stores."""
MAX_WINDOW_BYTES = 256 << 20
"""Of a window; a task is far smaller."""
_READ_BYTES = 1 << 20
_REFERENCE_BYTES = 8


def import_data_package(name: str, path: str) -> Any:
    """A package of the extra `data`."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path}: reading it needs {error.name}; run: pip install 'penstock-rl[data]'"
        ) from None


def digest_files(paths: list[Path]) -> str:
    """Digest of the content of these files, in this order."""
    found = blake3(max_threads=blake3.AUTO)
    for path in paths:
        found.update_mmap(path)
    return found.hexdigest()


class _Window:
    """The rows that were converted last. A row that cannot be converted is its error."""

    def __init__(self) -> None:
        self.start = 0
        self.rows: list[JsonObject | Exception] = []

    def __contains__(self, index: int) -> bool:
        return self.start <= index < self.start + len(self.rows)

    def fill(self, start: int, table: Any) -> None:
        """`table`: what pyarrow has `to_pylist` for. MemoryError if its rows are too long."""
        if sum(map(_num_bytes, table.columns)) > MAX_WINDOW_BYTES:
            raise MemoryError(f"{table.num_rows} rows have more than {MAX_WINDOW_BYTES:,} bytes")
        self.start = start
        try:
            self.rows = table.to_pylist()
        except (ValueError, OverflowError):
            self.rows = [_converted(table.slice(at, 1)) for at in range(table.num_rows)]

    def row(self, index: int, place: str) -> JsonObject:
        row = self.rows[index - self.start]
        if isinstance(row, UnicodeDecodeError):
            text = f"byte {row.start + 1} of a text is not UTF-8; write the file again from clean "
            raise BadRow(place, BadRowKind.INVALID_UTF8, f"{text}text, or declare it as binary")
        if isinstance(row, Exception):
            text = f"a value cannot be converted: {row}; convert it to text"
            raise BadRow(place, BadRowKind.UNSUPPORTED_TYPE, text)
        return row


def _num_bytes(array: Any) -> int:
    """About what its values take, which a file of some hundred bytes can repeat without end: a
    dictionary counts for each of its uses, and a value that is nothing has a reference too."""
    if hasattr(array, "chunks"):
        return sum(map(_num_bytes, array.chunks))
    if hasattr(array, "dictionary"):
        return len(array) * array.dictionary.nbytes
    if hasattr(array, "keys"):
        parts: list[Any] = [array.keys, array.items]
    elif hasattr(array, "flatten"):
        inner = array.flatten()
        parts = cast(list[Any], inner) if isinstance(inner, list) else [inner]
    else:
        return len(array) * _REFERENCE_BYTES + array.nbytes
    return len(array) * _REFERENCE_BYTES + sum(map(_num_bytes, parts))


def _converted(one_row: Any) -> JsonObject | Exception:
    try:
        return one_row.to_pylist()[0]
    except (ValueError, OverflowError) as error:
        return error


def _too_long(place: str, error: MemoryError) -> ConfigError:
    return ConfigError(f"{place}, or one after it, is too long: {error}; shorten its values")


class ParquetFile:
    """Reads forward in batches; a jump back starts at the row group it falls into."""

    def __init__(self, path: Path) -> None:
        parquet = import_data_package("pyarrow.parquet", str(path))
        self._path = path
        try:
            self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)
        except FileNotFoundError:
            raise ConfigError(
                f"{path}: No such file; a path is relative to the working directory, {Path.cwd()}"
            ) from None
        except (OSError, ValueError) as error:  # pyarrow's errors are both
            raise self._unreadable(error) from None
        metadata = self._file.metadata
        groups = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._group_starts = [0, *accumulate(groups)]
        self.columns: tuple[str, ...] = tuple(self._file.schema_arrow.names)
        self._window = _Window()
        self._batches: Iterator[Any] = iter(())
        self._next = len(self)
        """The row that `_batches` continues with; at first, none."""
        if not len(self):
            raise ConfigError(f"{path} has no rows; write at least one")

    def __len__(self) -> int:
        return self._group_starts[-1]

    def place(self, index: int) -> str:
        return f"{self._path} row {index + 1}"

    def digest(self) -> str:
        return digest_files([self._path])

    def row(self, index: int) -> JsonObject:
        if index not in self._window:
            self._move_to(index)
        return self._window.row(index, self.place(index))

    def _move_to(self, index: int) -> None:
        group = bisect_right(self._group_starts, index) - 1
        if not self._group_starts[group] <= self._next <= index:
            self._next = self._group_starts[group]
            groups = range(group, len(self._group_starts) - 1)
            self._batches = self._file.iter_batches(WINDOW_ROWS, row_groups=groups)
        while index not in self._window:
            start = self._next
            try:
                batch = next(self._batches)
                self._next += batch.num_rows
                if index < self._next:
                    self._window.fill(start, batch)
            except (OSError, ValueError, NotImplementedError) as error:
                raise self._unreadable(error) from None
            except MemoryError as error:
                raise _too_long(self.place(start), error) from None

    def _unreadable(self, error: Exception) -> ConfigError:
        why = " ".join(str(error).split())
        return ConfigError(
            f"{self._path} cannot be read as Parquet: {why}; it may be truncated or damaged: "
            "write or copy it again"
        )


class DatasetRows:
    """A `datasets.Dataset`, which is memory-mapped."""

    def __init__(self, dataset: Any, label: str) -> None:
        """`label` is the data set in messages."""
        self._dataset = dataset.with_format("arrow")
        self._label = label
        self.columns: tuple[str, ...] = tuple(dataset.column_names)
        self._window = _Window()
        if not len(self):
            raise ConfigError(f"{label} has no rows; choose another split")

    def __len__(self) -> int:
        return len(self._dataset)

    def place(self, index: int) -> str:
        return f"{self._label} row {index + 1}"

    def digest(self) -> str:
        files = [Path(entry["filename"]) for entry in self._dataset.cache_files]
        return digest_files(files) if files else str(self._dataset._fingerprint)

    def row(self, index: int) -> JsonObject:
        if index not in self._window:
            start = index - index % WINDOW_ROWS
            try:
                self._window.fill(start, self._dataset[start : min(start + WINDOW_ROWS, len(self))])
            except MemoryError as error:
                raise _too_long(self.place(start), error) from None
        return self._window.row(index, self.place(index))
