# SPDX-License-Identifier: Apache-2.0
"""Bundles: rows that one call put with the same columns, stored together. One record and one
payload for all of them, because for small rows a record each costs more than the values.

Owns the layout: keys in order, then for each row the sizes and digests of its bytes, or its
numbers. Knows nothing of who puts rows, or of where a payload lies."""

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
"""Of values in one bundle: whoever wants one row reads all of them."""
INLINE_BYTES = 16 << 10
"""Values of a bundle up to this stand in its record. A database takes them as fast as a file does,
and a second file to sync would double the time until the answer."""
DIGEST_BYTES = 32


class BlobLike(Protocol):
    """A value that went ahead, by name."""

    @property
    def digest(self) -> str: ...
    @property
    def size(self) -> int: ...


Values = Mapping[str, float | bytes | BlobLike]
"""By name of column."""
NewRow = tuple[RowId, Values]
MakeCell = Callable[[str, BlobLike], Cell]
"""Of a column and the blob it names, which must be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleLayout:
    """Of the rows of a bundle, all but their keys."""

    names: tuple[str, ...]
    """Columns of bytes; their values lie row by row in this order."""
    sizes: bytes
    """uint32 of each value."""
    digests: bytes
    """BLAKE3 of each value."""
    numbers: dict[str, bytes]
    """Columns of numbers: one float64 per row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleDraft:
    """Rows with the same columns, ready to be stored as one bundle."""

    rows: Sequence[NewRow]
    names: tuple[str, ...]
    """Of all columns, those of single cells too."""
    contents: BundleLayout
    payload: bytes
    single_cells: Mapping[RowId, tuple[Cell, ...]]
    """Columns that are stored alone: blobs."""

    @property
    def keys(self) -> list[RowId]:
        return [key for key, _ in self.rows]

    @property
    def num_cells(self) -> int:
        return len(self.rows) * (len(self.contents.names) + len(self.contents.numbers))

    def quota_bytes_used(self, each: int) -> int:
        """With so many for each column beside its value."""
        alone = sum(cell.length + each for cells in self.single_cells.values() for cell in cells)
        return len(self.payload) + each * self.num_cells + alone

    def cells(self, key: RowId, values: Values) -> list[Cell]:
        """Each column of one of these rows for itself."""
        found = [*self.single_cells.get(key, ())]
        found += [bytes_cell(name, _bytes(values[name])) for name in self.contents.names]
        return found + [number_cell(n, _number(n, values[n])) for n in self.contents.numbers]

    def without(self, keys: Container[RowId]) -> Iterator[BundleDraft]:
        """The rows of other keys."""

        def known(name: str, blob: BlobLike) -> Cell:
            return next(c for c in cells if (c.name, c.blob) == (name, blob.digest))

        cells = [cell for cells in self.single_cells.values() for cell in cells]
        return drafts((row for row in self.rows if row[0] not in keys), known)


def drafts(rows: Iterable[NewRow], make_cell: MakeCell) -> Iterator[BundleDraft]:
    """All rows in their order, as few bundles as that takes. BadRequest names a column that
    nobody can store."""
    for names, kinds, alike in _runs_of_same_columns(rows):
        yield from _drafts_of_shape(alike, _ColumnKinds.of(names, kinds), make_cell)


def _runs_of_same_columns(
    rows: Iterable[NewRow],
) -> Iterator[tuple[list[str], list[type], list[NewRow]]]:
    """Rows that follow one another and have the same columns."""
    names: list[str] = []
    kinds: list[type] = []
    run: list[NewRow] = []
    for row in rows:
        has, of = [*row[1]], [*map(type, row[1].values())]
        if run and (has != names or of != kinds):
            yield names, kinds, run
            run = []
        names, kinds = has, of
        run.append(row)
    if run:
        yield names, kinds, run


@dataclass(frozen=True, slots=True, kw_only=True)
class _ColumnKinds:
    """Names of columns: all, of bytes, of numbers, of blobs."""

    names: tuple[str, ...]
    byte_columns: tuple[str, ...]
    number_columns: tuple[str, ...]
    blob_columns: tuple[str, ...]

    @classmethod
    def of(cls, names: Sequence[str], kinds: Sequence[type]) -> _ColumnKinds:
        for name in names:
            check_column(name)
        kind = dict(zip(names, kinds, strict=True))
        byte_columns = tuple(name for name in names if kind[name] is bytes)
        number_columns = tuple(name for name in names if kind[name] in (float, int))
        blob_columns = tuple(name for name in names if name not in (*byte_columns, *number_columns))
        return cls(
            names=tuple(names),
            byte_columns=byte_columns,
            number_columns=number_columns,
            blob_columns=blob_columns,
        )


def _drafts_of_shape(
    rows: list[NewRow], shape: _ColumnKinds, make_cell: MakeCell
) -> Iterator[BundleDraft]:
    """Rows of one shape, in parts that are worth reading whole."""
    values = [_bytes(row[name]) for _, row in rows for name in shape.byte_columns]
    sizes, width = [*map(len, values)], len(shape.byte_columns)
    start, size = 0, 0
    for end in range(1, len(rows) + 1) if sum(sizes) > BUNDLE_BYTES else (len(rows),):
        size += sum(sizes[(end - 1) * width : end * width])
        if size >= BUNDLE_BYTES or end == len(rows):
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
    assert isinstance(value, bytes), "as its shape says"
    return value


def _number(name: str, value: float | bytes | BlobLike) -> float:
    assert isinstance(value, (int, float)), "as its shape says"
    return require_finite(name, value)


def _blob(value: float | bytes | BlobLike) -> BlobLike:
    assert not isinstance(value, (int, float, bytes)), "as its shape says"
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
    """place: gives longer values their place in the payload store."""
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
    """How to take some columns of a row out of a bundle."""

    width: int
    wanted: Sequence[tuple[str, int]]
    """Columns of bytes and their position in a row."""
    starts: Sequence[int]
    numbers: Mapping[str, Sequence[float]]

    def values(self, position: int, payload: bytes) -> dict[str, float | bytes]:
        starts, first = self.starts, position * self.width
        found: dict[str, float | bytes] = {
            name: payload[starts[first + n] : starts[first + n + 1]] for name, n in self.wanted
        }
        for name, numbers in self.numbers.items():
            found[name] = numbers[position]
        return found

    def all_values(self, num_rows: int, payload: bytes) -> list[dict[str, float | bytes]]:
        """Of every row; as `values` for each, but most bundles have one column and go faster."""
        if len(self.wanted) == self.width == 1 and not self.numbers:
            [(name, _)] = self.wanted
            return [{name: payload[start:end]} for start, end in pairwise(self.starts)]
        return [self.values(position, payload) for position in range(num_rows)]


class Bundle:
    """The rows of a stored bundle, by their position."""

    def __init__(self, record: BundleRecord) -> None:
        self.record = record
        self._contents = decode(record.contents, BundleLayout)

    @cached_property
    def keys(self) -> list[RowId]:
        return msgspec.json.decode(self.record.keys, type=list[RowId])

    @cached_property
    def names(self) -> tuple[str, ...]:
        return (*self._contents.names, *self._contents.numbers)

    @cached_property
    def _starts(self) -> list[int]:
        """Of each value in the payload, and where the last one ends."""
        sizes = array("I")
        sizes.frombytes(self._contents.sizes)
        return [*accumulate(sizes, initial=0)]

    @cached_property
    def _numbers(self) -> dict[str, array[float]]:
        return {name: array("d", data) for name, data in self._contents.numbers.items()}

    @property
    def where(self) -> Location | None:
        """Of its values in the payload store; None when they are here."""
        record = self.record
        if not record.segment:
            return None
        return Location(segment=record.segment, offset=record.offset, length=record.length)

    def cut(self, names: Sequence[str]) -> ColumnSlice:
        """These columns of any row; all of them when none are named."""
        order = self._contents.names
        wanted = [(name, order.index(name)) for name in order if not names or name in names]
        numbers = {n: found for n, found in self._numbers.items() if not names or n in names}
        return ColumnSlice(len(order), wanted, self._starts, numbers)

    def require(self, key: RowId, position: int) -> None:
        """StoreError when another row stands there: where a key is found has no checksum."""
        if not (0 <= position < len(self.keys) and self.keys[position] == key):
            raise StoreError(f"row {key} is damaged: another stands where it should be")

    def column(self, position: int, name: str) -> ColumnRecord | None:
        """As if it stood alone."""
        if name not in self.names:
            return None
        record, value = self.record, None
        if name in self._numbers:
            value = self._numbers[name][position]
            digest, length = number_cell(name, value).digest, 0
        else:
            names = self._contents.names
            number = position * len(names) + names.index(name)
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
