# SPDX-License-Identifier: Apache-2.0
"""Bundles: rows put in one call with the same columns, stored as one record and one payload. For
small rows, a record per row would cost more than the values.

Owns the layout: keys in order, then the sizes and digests of byte values and the numbers of each
row. Knows nothing about callers or payload storage."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import msgspec
from blake3 import blake3

from penstock.dataflow.column_records import BundleRecord, ColumnRecord
from penstock.dataflow.columns.cells import (
    Cell,
    bytes_cell,
    check_column,
    check_inline_size,
    number_cell,
    require_finite,
)
from penstock.dataflow.ledger.segments import Location
from penstock.errors import StoreError
from penstock.types import RowId
from penstock.wire.codec import decode, encode

BUNDLE_BYTES = 256 << 10
"""Maximum size of a bundle's values and keys: reading one row reads the full bundle."""
BUNDLE_CELLS = 8_192
"""Maximum number of a bundle's values: reading one row also reads their sizes and digests."""
INLINE_BYTES = 16 << 10
"""Bundles up to this size are stored in the database record. The database is as fast as a file for
these, and syncing a second file would double the latency of a put."""
DIGEST_BYTES = 32


class BlobLike(Protocol):
    """A reference to a value uploaded earlier."""

    @property
    def digest(self) -> str: ...
    @property
    def size(self) -> int: ...


Values = Mapping[str, float | bytes | BlobLike]
"""By column name."""
NewRow = tuple[RowId, Values]
MakeCell = Callable[[str, BlobLike], Cell]
"""Makes the cell of a column from a blob reference; the blob must exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleLayout:
    """Everything about the rows of a bundle except their keys and payload."""

    names: tuple[str, ...]
    """Byte columns; the payload has their values row by row in this order."""
    sizes: bytes
    """Size of each value, as uint32."""
    digests: bytes
    """BLAKE3 of each value."""
    numbers: dict[str, bytes]
    """Number columns: one float64 per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleDraft:
    """Rows with the same columns, ready to be stored as one bundle."""

    rows: Sequence[NewRow]
    names: tuple[str, ...]
    """All columns, including those in `single_cells`."""
    contents: BundleLayout
    payload: bytes
    single_cells: Mapping[RowId, tuple[Cell, ...]]
    """Blob columns, which are stored as single records."""

    @property
    def keys(self) -> list[RowId]:
        return [key for key, _ in self.rows]

    @property
    def num_cells(self) -> int:
        return len(self.rows) * (len(self.contents.names) + len(self.contents.numbers))

    def quota_bytes_used(self, each: int) -> int:
        """Bytes charged to the quota, with `each` bytes of overhead per column."""
        singles = sum(cell.length + each for cells in self.single_cells.values() for cell in cells)
        return len(self.payload) + each * self.num_cells + singles

    def cells(self, key: RowId, values: Values) -> list[Cell]:
        """The columns of one of these rows as separate cells."""
        found = [*self.single_cells.get(key, ())]
        found += [bytes_cell(name, _bytes(values[name])) for name in self.contents.names]
        return found + [number_cell(n, _number(n, values[n])) for n in self.contents.numbers]

    def without(self, keys: Container[RowId]) -> Iterator[BundleDraft]:
        """Drafts of the remaining rows after removing these keys."""

        def existing_cell(name: str, blob: BlobLike) -> Cell:
            return cells[name, blob.digest]

        cells = {(c.name, c.blob): c for made in self.single_cells.values() for c in made}
        return drafts((row for row in self.rows if row[0] not in keys), existing_cell)


def drafts(rows: Iterable[NewRow], make_cell: MakeCell) -> Iterator[BundleDraft]:
    """Pack all rows, in order, into as few bundles as possible. Raises BadRequest for a column
    that cannot be stored."""
    for names, kinds, run in _runs_of_same_columns(rows):
        yield from _drafts_of_shape(run, _ColumnKinds.of(names, kinds), make_cell)


def _runs_of_same_columns(
    rows: Iterable[NewRow],
) -> Iterator[tuple[list[str], list[type], list[NewRow]]]:
    """Consecutive rows with the same columns, in any order, with their names and types."""
    names: list[str] = []
    kinds: list[type] = []
    run: list[NewRow] = []
    for row in rows:
        row_names, row_kinds = [*row[1]], [*map(type, row[1].values())]
        if (row_names != names or row_kinds != kinds) and (
            {*zip(row_names, row_kinds, strict=True)} != {*zip(names, kinds, strict=True)}
        ):
            if run:
                yield names, kinds, run
            names, kinds, run = row_names, row_kinds, []
        run.append(row)
    if run:
        yield names, kinds, run


@dataclass(frozen=True, slots=True, kw_only=True)
class _ColumnKinds:
    """Column names: all, and by kind of value."""

    names: tuple[str, ...]
    byte_columns: tuple[str, ...]
    number_columns: tuple[str, ...]
    blob_columns: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], kinds: Sequence[type]) -> _ColumnKinds:
        for name in names:
            check_column(name)
        kind = dict(zip(names, kinds, strict=True))
        return cls(
            names=tuple(names),
            byte_columns=tuple(n for n in names if kind[n] is bytes),
            number_columns=tuple(n for n in names if kind[n] in (float, int)),
            blob_columns=tuple(n for n in names if kind[n] not in (bytes, float, int)),
        )


def _drafts_of_shape(
    rows: list[NewRow], shape: _ColumnKinds, make_cell: MakeCell
) -> Iterator[BundleDraft]:
    """Split rows with the same columns into bundles of about BUNDLE_BYTES, of BUNDLE_CELLS."""
    values = [_bytes(row[name]) for _, row in rows for name in shape.byte_columns]
    sizes, width = [*map(len, values)], len(shape.byte_columns)
    keys_size = sum([len(key) for key, _ in rows])
    start, size, most_rows = 0, 0, BUNDLE_CELLS // max(1, len(shape.names))
    is_one = sum(sizes) + keys_size <= BUNDLE_BYTES and len(rows) <= most_rows
    for end in (len(rows),) if is_one else range(1, len(rows) + 1):
        size += sum(sizes[(end - 1) * width : end * width]) + len(rows[end - 1][0])
        if size >= BUNDLE_BYTES or end == len(rows) or end - start >= most_rows:
            cut = slice(start * width, end * width)
            yield _draft(rows[start:end], shape, values[cut], sizes[cut], make_cell)
            start, size = end, 0


def _draft(
    rows: list[NewRow],
    shape: _ColumnKinds,
    values: list[bytes],
    sizes: list[int],
    make_cell: MakeCell,
) -> BundleDraft:
    check_inline_size(shape.byte_columns, sizes)
    contents = BundleLayout(
        names=shape.byte_columns,
        sizes=array("I", sizes).tobytes(),
        digests=b"".join([blake3(value).digest() for value in values]),
        numbers={
            name: array("d", [_number(name, row[name]) for _, row in rows]).tobytes()
            for name in shape.number_columns
        },
    )
    single_cells = {
        key: tuple(make_cell(name, _blob(row[name])) for name in shape.blob_columns)
        for key, row in (rows if shape.blob_columns else ())
    }
    return BundleDraft(
        rows=rows,
        names=shape.names,
        contents=contents,
        payload=b"".join(values),
        single_cells=single_cells,
    )


def _bytes(value: float | bytes | BlobLike) -> bytes:
    assert isinstance(value, bytes), "_ColumnKinds sorts columns by type"
    return value


def _number(name: str, value: float | bytes | BlobLike) -> float:
    assert isinstance(value, (int, float)), "_ColumnKinds sorts columns by type"
    return require_finite(name, value)


def _blob(value: float | bytes | BlobLike) -> BlobLike:
    assert not isinstance(value, (int, float, bytes)), "_ColumnKinds sorts columns by type"
    return value


def bundle_record(
    draft: BundleDraft,
    place: Callable[[bytes], Location],
    *,
    space: str,
    arrival: int,
    writer: str,
    now: float,
) -> BundleRecord:
    """`place` writes values above INLINE_BYTES to the payload store."""
    contents, payload = draft.contents, draft.payload
    where = Location(segment=0, offset=0, length=len(payload))
    if len(payload) > INLINE_BYTES:
        where, payload = place(payload), b""
    return BundleRecord(
        space=space,
        arrival=arrival,
        num_cells=draft.num_cells,
        names=msgspec.json.encode((*contents.names, *contents.numbers)).decode(),
        keys=msgspec.json.encode(draft.keys).decode(),
        contents=encode(contents),
        segment=where.segment,
        offset=where.offset,
        length=where.length,
        writer=writer,
        at=now,
        payload=payload,
    )


class ColumnSlice(NamedTuple):
    """Extracts some columns of a row from a bundle's payload."""

    width: int
    byte_columns: Sequence[tuple[str, int]]
    """Byte columns and their position in a row."""
    starts: Sequence[int]
    numbers: Mapping[str, Sequence[float]]

    def values(self, position: int, payload: bytes) -> dict[str, float | bytes]:
        starts, first = self.starts, position * self.width
        found: dict[str, float | bytes] = {
            name: payload[starts[first + column] : starts[first + column + 1]]
            for name, column in self.byte_columns
        }
        for name, numbers in self.numbers.items():
            found[name] = numbers[position]
        return found

    def all_values(self, num_rows: int, payload: bytes) -> list[dict[str, float | bytes]]:
        """`values` of every row, with a fast path for bundles of one column, the usual case."""
        if len(self.byte_columns) == self.width == 1 and not self.numbers:
            [(name, _)] = self.byte_columns
            return [{name: payload[start:end]} for start, end in pairwise(self.starts)]
        return [self.values(position, payload) for position in range(num_rows)]


class Bundle:
    """The rows of a stored bundle, by position."""

    def __init__(self, record: BundleRecord) -> None:
        self.record = record
        self._contents = decode(record.contents, BundleLayout)

    @property
    def index_bytes(self) -> int:
        """Bytes that are read and decoded for any of its rows, beside the values."""
        return len(self.record.keys) + len(self.record.contents)

    @cached_property
    def keys(self) -> list[RowId]:
        return msgspec.json.decode(self.record.keys, type=list[RowId])

    @cached_property
    def names(self) -> tuple[str, ...]:
        return (*self._contents.names, *self._contents.numbers)

    @cached_property
    def _starts(self) -> list[int]:
        """Start of each value in the payload, then the end of the last one."""
        sizes = array("I")
        sizes.frombytes(self._contents.sizes)
        return [*accumulate(sizes, initial=0)]

    @cached_property
    def _byte_positions(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self._contents.names)}

    @cached_property
    def _numbers(self) -> dict[str, array[float]]:
        return {name: array("d", data) for name, data in self._contents.numbers.items()}

    def select(self, names: Sequence[str]) -> ColumnSlice:
        """These columns, or all columns if `names` is empty."""
        order, wanted = self._contents.names, frozenset(names)
        byte_columns = [(n, at) for at, n in enumerate(order) if not wanted or n in wanted]
        numbers = {n: found for n, found in self._numbers.items() if not wanted or n in wanted}
        return ColumnSlice(len(order), byte_columns, self._starts, numbers)

    def require(self, key: RowId, position: int) -> None:
        """Raise StoreError if this position holds another row; positions have no checksum."""
        if not (0 <= position < len(self.keys) and self.keys[position] == key):
            raise StoreError(
                f"row {key} is damaged: position {position} of its bundle does not hold this row"
            )

    def column(self, position: int, name: str) -> ColumnRecord | None:
        """The column as a single record; None if the bundle does not have it."""
        record, value = self.record, None
        if name not in self._numbers and name not in self._byte_positions:
            return None
        if name in self._numbers:
            value = self._numbers[name][position]
            digest, length = number_cell(name, value).digest, 0
        else:
            number = position * len(self._byte_positions) + self._byte_positions[name]
            length = self._starts[number + 1] - self._starts[number]
            start = number * DIGEST_BYTES
            digest = self._contents.digests[start : start + DIGEST_BYTES].hex()
        return ColumnRecord(
            space=record.space,
            row_id=self.keys[position],
            name=name,
            failed="",
            value=value,
            digest=digest,
            segment=record.segment,
            offset=record.offset,
            length=length,
            writer=record.writer,
            at=record.at,
        )
