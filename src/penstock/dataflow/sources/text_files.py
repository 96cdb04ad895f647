# SPDX-License-Identifier: Apache-2.0
"""Rows of JSONL and CSV files, found by their position: a file is never in memory as a whole.

Owns the two formats and their line numbers. Refuses a header that names a column twice, or not at
all. The file stays open, so replacing it does not change a run that reads it."""

from __future__ import annotations

import csv
import io
import json
import os
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from penstock.dataflow.sources.bad_rows import BadRow, BadRowKind
from penstock.errors import ConfigError
from penstock.plugins import quoted
from penstock.types import JsonObject

_BOM = b"\xef\xbb\xbf"
_CHUNK_BYTES = 1 << 20
_MAX_FIELD_CHARS = 1 << 28
"""csv's own limit of 131,072 characters is short for a prompt."""


class _TextFile:
    """A file and where each of its rows starts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"{path}: {error.strerror}; a path is relative to the working directory, "
                f"{Path.cwd()}"
            ) from None
        weakref.finalize(self, os.close, self._file)
        if not path.is_file():
            raise ConfigError(f"{path} is not a file; name a file, or a folder without this suffix")
        self._starts = array("Q")
        self._lines = array("Q")

    def __len__(self) -> int:
        return len(self._lines)

    def place(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}"

    def digest(self) -> str:
        found, at = blake3(), 0
        while chunk := os.pread(self._file, _CHUNK_BYTES, at):
            found.update(chunk)
            at += len(chunk)
        return found.hexdigest()

    def _add(self, start: int, line: int) -> None:
        self._starts.append(start)
        self._lines.append(line)

    def _finish(self, end: int, what: str) -> None:
        self._starts.append(end)
        if not self._lines:
            raise ConfigError(f"{self._path} has no rows; {what}")

    def _is_cut_off(self, index: int) -> bool:
        """Whether the row is the last and no line break follows it."""
        end = self._starts[-1]
        return index == len(self) - 1 and os.pread(self._file, 1, end - 1) != b"\n"

    def _raw(self, index: int) -> bytes:
        start, end = self._starts[index], self._starts[index + 1]
        return os.pread(self._file, end - start, start)

    def _text(self, index: int) -> str:
        try:
            return self._raw(index).decode()
        except UnicodeDecodeError as error:
            text = f"byte {error.start + 1} of this row, 0x{error.object[error.start]:02x}, is not "
            text = f"{text}UTF-8; convert the file, such as with iconv -t UTF-8"
            raise BadRow(self.place(index), BadRowKind.INVALID_UTF8, text) from None

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        """Every line with its position, without the byte order mark of the file."""
        at = 0
        with os.fdopen(os.dup(self._file), "rb", buffering=_CHUNK_BYTES) as file:
            file.seek(0)
            for raw in file:
                skipped = len(_BOM) if at == 0 and raw.startswith(_BOM) else 0
                yield at + skipped, raw[skipped:]
                at += len(raw)


class JsonlFile(_TextFile):
    """One JSON object per line; empty lines do not count as rows."""

    columns = None

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        end = 0
        for line, (start, raw) in enumerate(self._raw_lines(), 1):
            if raw.strip():
                self._add(start, line)
            end = start + len(raw)
        self._finish(end, "write one JSON object per line")

    def row(self, index: int) -> JsonObject:
        text = self._text(index)
        try:
            row: Any = json.loads(text)
        except (ValueError, RecursionError) as error:
            why, kind = str(error) or "nested too deeply", BadRowKind.INVALID_JSON
            fix = "write one JSON object per line"
            if self._is_cut_off(index):
                why, kind = f"the file ends inside this row: {why}", BadRowKind.TRUNCATED
                fix = "copy the file again"
            raise BadRow(self.place(index), kind, f"invalid JSON: {why}; {fix}") from None
        if not isinstance(row, dict):
            text = f'a task must be a JSON object, got {quoted(row)}; write {{"prompt": …}}'
            raise BadRow(self.place(index), BadRowKind.NOT_AN_OBJECT, text)
        return cast(JsonObject, row)


class CsvFile(_TextFile):
    """Rows of comma-separated text under a header. Every value is text."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        csv.field_size_limit(_MAX_FIELD_CHARS)
        self._consumed = 0
        reader = csv.reader(self._decoded_lines(), strict=True)
        header = self._next_fields(reader)
        self.columns = self._check_header(header or [])
        start, line = self._consumed, reader.line_num + 1
        while (fields := self._next_fields(reader)) is not None:
            if fields:
                self._add(start, line)
            start, line = self._consumed, reader.line_num + 1
        self._finish(self._consumed, "write them below the header")

    def _decoded_lines(self) -> Iterator[str]:
        for start, raw in self._raw_lines():
            self._consumed = start + len(raw)
            yield raw.decode(errors="replace")  # only to find where rows end

    def _next_fields(self, reader: Any) -> list[str] | None:
        try:
            return next(reader, None)
        except csv.Error:
            return ["not valid"]  # `row` says why

    def _check_header(self, header: list[str]) -> tuple[str, ...]:
        place, earlier = f"{self._path}:1", set[str]()
        for number, name in enumerate(header, 1):
            if not name.strip():
                text = f"column {number} of the header has no name; give it one"
                raise BadRow(place, BadRowKind.MISSING_COLUMN, text)
            if name in earlier:
                text = f"the header has the column {quoted(name)} twice; rename one of them"
                raise BadRow(place, BadRowKind.DUPLICATE_COLUMN, text)
            earlier.add(name)
        if not header:
            raise ConfigError(f"{self._path} is empty; write a header and one task per row")
        return tuple(header)

    def row(self, index: int) -> JsonObject:
        fields = self._fields(index)
        if len(fields) != len(self.columns):
            text = f"{len(fields)} fields, but the header has {len(self.columns)}; put quotes "
            text = f'{text}around a field that has a comma, and write a quote as ""'
            raise BadRow(self.place(index), BadRowKind.FIELD_COUNT, text)
        return dict(zip(self.columns, fields, strict=True))

    def _fields(self, index: int) -> list[str]:
        lines = io.StringIO(self._text(index), newline="")
        try:
            return next(csv.reader(lines, strict=True))
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                kind, text = BadRowKind.TRUNCATED, "the file ends inside a quoted field; close the "
                text = f"{text}quote, or copy the file again"
            else:
                kind, text = BadRowKind.INVALID_CSV, f'{error}; write a quote inside a field as ""'
            raise BadRow(self.place(index), kind, text) from None
