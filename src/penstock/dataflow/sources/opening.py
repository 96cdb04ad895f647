# SPDX-License-Identifier: Apache-2.0
"""Opens a source: a task module, or rows of a data set whose columns become the keys of a task.

Owns the choice of format, the mapping of columns and the check of all rows. The formats are in
`text_files`, `tables` and `hub`."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol, cast

from blake3 import blake3

from penstock.dataflow.sources.bad_rows import BadRow, BadRowKind, BadRows
from penstock.dataflow.sources.row_checks import PROMPT, check_prompt, check_values, missing_prompt
from penstock.dataflow.sources.source import MakeTask, Source
from penstock.errors import ConfigError
from penstock.plugins import load_module
from penstock.types import JsonObject

MAX_BAD_ROWS = 1_000
"""The check stops after this many."""
COUNTED_AT_ONCE = 32
"""Prompts whose tokens are counted in one call, and so are in memory."""
LOCAL_PREFIXES = ("/", "./", "../", "~")
"""How a path starts that is never a data set of the Hub."""

CountTokens = Callable[[Sequence[object]], Sequence[int]]
"""Number of tokens of each prompt: text, or a list of messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSpec:
    """Which rows, and how they become tasks."""

    path: str
    """A file, a folder, or the id of a Hub data set."""
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    columns: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    """Key of the task to column of the data; None drops the column of that name."""
    limit: int | None = None
    """Use only the first rows, this many."""
    max_prompt_tokens: int | None = None
    has_prompt: bool = False
    """Each row must have a valid prompt."""
    path_key: str = "data.path"
    """The key that users set, for messages."""


class Rows(Protocol):
    """A data set, read by position."""

    @property
    def columns(self) -> tuple[str, ...] | None:
        """None if each row has its own keys."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> JsonObject:
        """Raises BadRow if the row cannot be read."""
        ...

    def place(self, index: int) -> str: ...

    def digest(self) -> str: ...


class DataSet:
    """Rows as tasks."""

    def __init__(self, source: str, spec: DataSpec) -> None:
        self._source = source
        self._spec = spec
        self._rows = _open_rows(spec)
        self._renamed = {ours: theirs for ours, theirs in spec.columns.items() if theirs}
        self._hidden = {*self._renamed.values(), *spec.columns}
        """Columns that do not keep their own name."""
        if self._rows.columns is not None:
            self._check_columns(self._rows.columns)

    def __len__(self) -> int:
        return min(len(self._rows), self._spec.limit or len(self._rows))

    def digest(self) -> str:
        """Of the content and of what is made of it, wherever it is stored."""
        settings = {**asdict(self._spec), "path": ""}
        text = json.dumps([self._rows.digest(), settings], sort_keys=True)
        return blake3(text.encode()).hexdigest()

    def row(self, index: int) -> JsonObject:
        """A row as it is stored, with its own columns. Raises BadRow if it cannot be read."""
        return self._rows.row(index)

    def place(self, index: int) -> str:
        """Where a row is, for messages."""
        return self._rows.place(index)

    def payload(self, index: int) -> JsonObject:
        """The task of a row. Raises BadRow if it cannot be read or encoded; its prompt is left to
        `check` and to the workflow."""
        place = self._rows.place(index)
        payload = self._mapped(self._rows.row(index), place)
        check_values(payload, place)
        return payload

    def check(self, count_tokens: CountTokens | None = None) -> None:
        """Read every row; raise BadRows if any is not valid. Without `count_tokens`, prompts may
        have any length."""
        found: list[BadRow] = []
        num_read = 0
        with _naming(self._source):
            self._check_prompt_column()
            for part in _parts(len(self)):
                found += self._check_part(part, count_tokens)
                num_read = part.stop
                if len(found) >= MAX_BAD_ROWS:
                    break
        if found:
            raise BadRows(self._source, found, num_read=num_read, total=len(self))

    def _check_part(self, part: range, count_tokens: CountTokens | None) -> Iterator[BadRow]:
        prompts: dict[int, object] = {}
        for index in part:
            try:
                payload = self.payload(index)
                if self._spec.has_prompt:
                    check_prompt(payload, self._rows.place(index))
                if count_tokens is not None:
                    prompts[index] = payload.get(PROMPT)
            except BadRow as bad:
                yield bad
        most = self._spec.max_prompt_tokens
        if count_tokens is None or most is None:
            return
        counts = count_tokens([*prompts.values()])
        for index, count in zip(prompts, counts, strict=True):
            if count > most:
                text = f"has {count:,} tokens, more than max_prompt_tokens ({most:,}); shorten it, "
                text = f"{text}raise max_prompt_tokens, or remove the row"
                place = self._rows.place(index)
                yield BadRow(place, BadRowKind.LONG_PROMPT, text, column=PROMPT)

    def _mapped(self, row: JsonObject, place: str) -> JsonObject:
        payload = {name: value for name, value in row.items() if name not in self._hidden}
        for ours, theirs in self._renamed.items():
            if theirs not in row:
                text = f"column {theirs!r} is missing; the row has: {', '.join(row) or 'nothing'}"
                text = f"{text}; add it, or change data.columns"
                raise BadRow(place, BadRowKind.MISSING_COLUMN, text, column=ours)
            payload[ours] = row[theirs]
        return payload

    def _check_columns(self, columns: tuple[str, ...]) -> None:
        """Columns that no row can have, or that would hide another."""
        listed = ", ".join(columns)
        if len({*columns}) < len(columns):
            raise ConfigError(
                f"{self._spec.path} has two columns of one name; its columns are: {listed}; rename "
                "one of them"
            )
        for ours, theirs in self._renamed.items():
            if theirs not in columns:
                raise ConfigError(
                    f"{self._spec.path} has no column {theirs!r}, which data.columns maps to "
                    f"{ours}; its columns are: {listed}"
                )

    def _check_prompt_column(self) -> None:
        columns = self._rows.columns
        if columns is None or not self._spec.has_prompt:
            return
        kept = [name for name in columns if name not in self._hidden]
        if PROMPT not in (*kept, *self._renamed):
            raise ConfigError(f"{self._spec.path}: {PROMPT} {missing_prompt(columns)}")


def _parts(total: int) -> Iterator[range]:
    for start in range(0, total, COUNTED_AT_ONCE):
        yield range(start, min(start + COUNTED_AT_ONCE, total))


def _open_rows(spec: DataSpec) -> Rows:
    path = Path(spec.path).expanduser()
    if path.suffix == ".jsonl":
        from penstock.dataflow.sources.text_files import JsonlFile

        return JsonlFile(path)
    if path.suffix == ".csv":
        from penstock.dataflow.sources.text_files import CsvFile

        return CsvFile(path)
    if path.suffix == ".parquet":
        from penstock.dataflow.sources.tables import ParquetFile

        return ParquetFile(path)
    from penstock.dataflow.sources.hub import open_folder, open_hub

    if path.is_dir() or spec.path.startswith(LOCAL_PREFIXES):
        return open_folder(path, name=spec.name, split=spec.split)
    return open_hub(
        spec.path,
        name=spec.name,
        split=spec.split,
        revision=spec.revision,
        path_key=spec.path_key,
    )


def open_data(name: str, spec: DataSpec) -> DataSet:
    """The data set of the source `name`. Reads no more than it takes to find its rows."""
    with _naming(name):
        return DataSet(name, spec)


@contextmanager
def _naming(source: str) -> Generator[None]:
    """Name the source in every error."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"source {source!r}: {error}") from None


def open_source(
    name: str,
    where: str | DataSpec,
    *,
    weight: float = 1.0,
    limit: int | None = None,
    workflow: str = "",
) -> Source:
    """A module with `make_task(ordinal, seed)`, or rows: a DataSpec or the path of a file.

    `workflow` overrides the run's."""
    if isinstance(where, str) and not where.endswith((".jsonl", ".csv", ".parquet")):
        make = _load_make_task(name, where)
        return Source(name=name, weight=weight, make=make, limit=limit, workflow=workflow)
    spec = DataSpec(path=where) if isinstance(where, str) else where
    data = open_data(name, spec)

    def from_rows(ordinal: int, seed: int) -> JsonObject:
        with _naming(name):
            return data.payload(ordinal % len(data))

    return Source(
        name=name,
        weight=weight,
        make=from_rows,
        limit=limit,
        workflow=workflow,
        hash_content=data.digest,
    )


def _load_make_task(name: str, module_name: str) -> MakeTask:
    try:
        module = load_module(module_name)
    except ConfigError as error:
        raise ConfigError(f"source {name!r}: {error}") from error.__cause__
    make = getattr(module, "make_task", None)
    if not callable(make):
        raise ConfigError(
            f"source {name!r}: {module_name} has no make_task(ordinal, seed); see "
            "penstock.tasks.reverse"
        )
    return cast(MakeTask, make)
