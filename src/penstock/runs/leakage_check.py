# SPDX-License-Identifier: Apache-2.0
"""Compares the data sets that a run trains on with the suites that evaluate it.

Owns how many rows are read, for how long, and the wording. What counts as a repetition is decided
in `leakage`. Tasks of modules and environments are not compared: they have no last one. A leak is a
note, since some runs want it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast

from penstock.config import RunConfig
from penstock.config.evaluation import SuiteConfig
from penstock.dataflow.service.build_sources import data_spec
from penstock.dataflow.sources import BadRow, open_data
from penstock.dataflow.sources.leakage import Leak, LeakFinder, shared_frame, words_of
from penstock.dataflow.sources.opening import DataSet
from penstock.dataflow.sources.suites import open_suite
from penstock.errors import ConfigError

MAX_ROWS = 50_000
"""Rows of a source that are compared."""
BUDGET_S = 20.0
"""Seconds for the rows of a source."""
NUM_LISTED = 5
"""Pairs that one note lists."""
_NUM_FRAMED = 200
"""Tasks from which the instruction around every task is learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeakBounds:
    max_rows: int | None = MAX_ROWS
    budget_s: float | None = BUDGET_S


@dataclass(slots=True, kw_only=True)
class _Compared:
    """What the comparison of one source found."""

    num_read: int = 0
    leaks: list[tuple[str, str, Leak]] = field(default_factory=list[tuple[str, str, Leak]])
    """Place of the row, name of the suite, and the leak."""


def leakage_notes(
    config: RunConfig, suites: Sequence[SuiteConfig], bounds: LeakBounds | None = None
) -> Iterator[str]:
    """One note for each source and suite with common questions, and for what was not compared."""
    finders = dict[str, LeakFinder]()
    for suite in suites:
        try:
            opened = open_suite(suite, Path.cwd())
        except ConfigError as error:
            yield f"not compared with the training data: {error}"
            continue
        texts = {str(task["question"]): prompt_text(task["prompt"]) for task in opened.tasks}
        finders[suite.name] = LeakFinder(texts)
    for source in config.sources if finders else ():
        spec = data_spec(config, source)
        if spec is None:
            continue
        try:
            data = open_data(source.name, spec)
        except ConfigError:
            continue  # the check of data sets reports it
        yield from _source_notes(source.name, data, finders, bounds or LeakBounds())


def _source_notes(
    source: str, data: DataSet, finders: Mapping[str, LeakFinder], bounds: LeakBounds
) -> Iterator[str]:
    found = _compare(data, finders, bounds)
    if found.num_read < len(data):
        yield (
            f"source {source}: {found.num_read:,} of {len(data):,} tasks were compared with the "
            "suites; `penstock check --all-rows` compares all"
        )
    for suite in finders:
        leaks = [(place, leak) for place, name, leak in found.leaks if name == suite]
        if leaks:
            pairs = [f"{place} = {leak.question} ({leak.kind})" for place, leak in leaks]
            more = f", and {len(pairs) - NUM_LISTED:,} more" if len(pairs) > NUM_LISTED else ""
            yield (
                f"source {source}: {len(leaks):,} of {found.num_read:,} tasks repeat questions of "
                f"suite {suite}: {', '.join(pairs[:NUM_LISTED])}{more}; remove them, or the score "
                "does not say how the model does on new questions"
            )


def _compare(data: DataSet, finders: Mapping[str, LeakFinder], bounds: LeakBounds) -> _Compared:
    found = _Compared()
    stop_at = None if bounds.budget_s is None else time.monotonic() + bounds.budget_s
    head, tail = shared_frame([words for _, words in islice(_row_words(data), _NUM_FRAMED)])
    for place, words in islice(_row_words(data), bounds.max_rows):
        if stop_at is not None and time.monotonic() > stop_at:
            break
        found.num_read += 1
        own = words[head : len(words) - tail]
        for name, finder in finders.items():
            if leak := finder.find(own):
                found.leaks.append((place, name, leak))
    return found


def _row_words(data: DataSet) -> Iterator[tuple[str, list[str]]]:
    """Place and words of each prompt. A row that cannot be read has none; the check of data sets
    reports it."""
    for index in range(len(data)):
        try:
            prompt = data.payload(index).get("prompt")
        except BadRow:
            prompt = ""
        yield data.place(index), words_of(prompt_text(prompt))


def prompt_text(prompt: Any) -> str:
    """What a task asks: text, or the messages of the user."""
    if isinstance(prompt, str):
        return prompt
    messages = cast("list[dict[str, Any]]", prompt if isinstance(prompt, list) else [])
    asked = [message for message in messages if message.get("role") == "user"]
    return "\n".join(str(message.get("content") or "") for message in asked)
