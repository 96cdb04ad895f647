# SPDX-License-Identifier: Apache-2.0
"""Records as rows of SQL values, and back: one column per field, and a checksum over them. Moves of
payload are written in the same way.

Knows the types of the fields; knows no database."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import compress
from operator import attrgetter, itemgetter
from typing import (
    Annotated,
    Any,
    ClassVar,
    Generic,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import crc32c
import msgspec

from penstock.dataflow.column_records import ItemRecord
from penstock.dataflow.records import RECORDS, Record
from penstock.errors import StoreError
from penstock.types import RowId, RowSummary

R = TypeVar("R")
TYPES = {str: "TEXT", int: "BIGINT", float: "FLOAT", bytes: "BLOB", bool: "BOOLEAN"}
"""Column type of each Python type, in SQLite."""
CHECKSUM = "checksum"
"""CRC32C of a record, since SQLite has no page checksums. Never 0: SQLite fills in defaults for
fields missing from a damaged record. Items have none, since their bundle's checksum covers them."""
LOCATION_FIELDS = frozenset({"segment", "offset"})
"""Changed by compaction alone; the payload there has its own checksum and digest."""
LIST_CONDITION = re.compile(r"\bIN :(\w+)")
"""A condition on a list of values, which each database writes in its own way."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PayloadMove:
    """A new location for the payload of a record. Applies only if the record still has the old
    one, so a record that was deleted or put again meanwhile is not changed."""

    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]
    """All fields but the new location, in their order."""

    to_segment: int
    to_offset: int
    segment: int
    offset: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowMove(PayloadMove):
    TABLE: ClassVar[str] = "rows"
    KEY: ClassVar[tuple[str, ...]] = ("segment", "offset", "row_id")

    row_id: RowId


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ColumnMove(PayloadMove):
    TABLE: ClassVar[str] = "columns"
    KEY: ClassVar[tuple[str, ...]] = ("segment", "offset", "space", "row_id", "name")

    space: str
    row_id: RowId
    name: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BundleMove(PayloadMove):
    TABLE: ClassVar[str] = "bundles"
    KEY: ClassVar[tuple[str, ...]] = ("segment", "offset", "space", "arrival")

    space: str
    arrival: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    name: str
    path: str
    """Attribute of the record; `summary.reward` for a field of a nested record."""
    hint: Any

    @property
    def type(self) -> type[Any]:
        """What the database stores: one of TYPES."""
        hint = self.hint
        if get_origin(hint) in (types.UnionType, Union):
            hint = next(arg for arg in get_args(hint) if arg is not type(None))
        hint = getattr(hint, "__supertype__", hint)
        if get_origin(hint) is Annotated:  # a bound of the wire
            hint = get_args(hint)[0]
        return str if self.is_json or issubclass(hint, StrEnum) else hint

    @property
    def is_json(self) -> bool:
        return get_origin(self.hint) in (Mapping, tuple)

    @property
    def empty_json(self) -> str:
        return "{}" if get_origin(self.hint) is Mapping else "[]"

    @property
    def is_free_text(self) -> bool:
        """Text of any origin; an enum or JSON has none that a database cannot store."""
        return self.type is str and not self.is_json and not _is_enum(self.hint)

    @property
    def decoder(self) -> Callable[[str], Any] | None:
        """For a value that is not stored as it is. Enums of an outer record stay plain text."""
        hint = self.hint
        if self.is_json:
            return msgspec.json.Decoder(hint).decode
        return hint if _is_enum(hint) and self.path != self.name else None


def _is_enum(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, StrEnum)


def quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _fields(kind: type[Any], prefix: str = "") -> list[Column]:
    hints = get_type_hints(kind)
    return [
        Column(name=name, path=prefix + name, hint=hint)
        for name, hint in hints.items()
        if get_origin(hint) is not ClassVar
    ]


class Codec(Generic[R]):
    """The records of one kind. A nested record has one column for each of its fields."""

    def __init__(self, kind: type[R]) -> None:
        columns: list[Column] = []
        self._nested: list[tuple[str, type[Any], list[str]]] = []
        for field in _fields(kind):
            if field.hint is RowSummary:
                nested: type[Any] = field.hint
                inner = _fields(nested, f"{field.name}.")
                self._nested.append((field.name, nested, [column.name for column in inner]))
                columns += inner
            else:
                columns.append(field)
        self._kind = cast(type[Record], kind)
        self._names = [column.name for column in columns]
        self._values = attrgetter(*(column.path for column in columns))
        self._jsons = [(i, column.empty_json) for i, column in enumerate(columns) if column.is_json]
        self._texts = [i for i, column in enumerate(columns) if column.is_free_text]
        self._bools = [i for i, column in enumerate(columns) if column.hint is bool]
        self._decoders = [(i, c.decoder) for i, c in enumerate(columns) if c.decoder is not None]
        self._is_checksummed = kind in RECORDS  # not the moves of payload
        self._is_checked = [name not in LOCATION_FIELDS for name in self._names]
        checked = compress(columns, self._is_checked)
        self._floats = [i for i, column in enumerate(checked) if column.type is float]
        if self._is_checksummed:
            columns.append(Column(name=CHECKSUM, path=CHECKSUM, hint=int))
        self.columns = tuple(columns)
        self.names = quoted(column.name for column in columns)
        self.select = f'SELECT {self.names} FROM "{self._kind.TABLE}"'
        self.key = attrgetter(*self._kind.KEY)
        self._stored_key = itemgetter(*map(self._names.index, self._kind.KEY))

    def on_conflict(self) -> str:
        """End of an INSERT: a record with the same key is replaced."""
        names = (column.name for column in self.columns if column.name not in self._kind.KEY)
        changes = ", ".join(f'"{name}" = excluded."{name}"' for name in names)
        return f"ON CONFLICT ({quoted(self._kind.KEY)}) DO UPDATE SET {changes}"

    def encode(self, records: Iterable[R]) -> list[Sequence[Any]]:
        """One value per column; maps and tuples become JSON text. For equal keys the last record
        wins."""
        rows: list[Sequence[Any]] = [*map(self._values, records)]
        if self._jsons:
            rows = [*map(self._with_json, rows)]
        if self._texts:
            rows = [*map(self._with_storable_text, rows)]
            rows = [*{self._stored_key(row): row for row in rows}.values()]  # keys may be equal now
        if self._is_checksummed:
            rows = [(*row, self._checksum(row)) for row in rows]
        return rows

    def _with_json(self, row: Sequence[Any]) -> Sequence[Any]:
        encoded = [*row]
        for index, empty in self._jsons:
            value = encoded[index]
            encoded[index] = msgspec.json.encode(value).decode() if value else empty
        return encoded

    def _with_storable_text(self, row: Sequence[Any]) -> Sequence[Any]:
        """PostgreSQL refuses a NUL, and no database stores half a surrogate pair: each becomes
        U+FFFD. Ids with a NUL are refused before; errors may quote what a model wrote."""
        all_text = "".join([row[index] or "" for index in self._texts])
        if all_text.isascii() and "\0" not in all_text:
            return row
        for index in self._texts:
            text = row[index] or ""
            if not text.isascii():
                text = text.encode(errors="replace").decode()
            if "\0" in text:
                text = text.replace("\0", "\ufffd")
            if text != (row[index] or ""):
                row = [*row[:index], text, *row[index + 1 :]]
        return row

    def decode(self, rows: Iterable[Sequence[Any]]) -> list[R]:
        """Raises StoreError for a record that is not as it was written."""
        is_checked = self._kind is not ItemRecord
        found: list[R] = []
        for *row, checksum in rows:
            for index in self._bools:
                row[index] = bool(row[index])  # a number in SQLite
            if is_checked and checksum != self._checksum(row):
                which = ", ".join(map(str, row[:3]))
                raise StoreError(f"a record of table {self._kind.TABLE} is damaged: {which}, …")
            for index, decode in self._decoders:
                row[index] = decode(row[index])
            found.append(self._record(row))
        return found

    def _record(self, row: Sequence[Any]) -> R:
        values = dict(zip(self._names, row, strict=True))
        for name, nested, inner in self._nested:
            values[name] = nested(**{column: values.pop(column) for column in inner})
        return cast(Callable[..., R], self._kind)(**values)

    def _checksum(self, row: Sequence[Any]) -> int:
        """An integer in a float column is read back as a float, so it is hashed as one."""
        values = [*compress(row, self._is_checked)]
        for index in self._floats:
            if values[index].__class__ is int:
                values[index] = float(values[index])
        return crc32c.crc32c(msgspec.msgpack.encode(values)) or 1


@functools.cache
def codec(kind: type[R]) -> Codec[R]:
    return Codec(kind)
