# SPDX-License-Identifier: Apache-2.0
"""Labels the steps of traces, by a judge or a program: a number from 0 to 1 each.

Owns resuming (rows that are labelled are not labelled again) and what becomes of a step without a
label: malformed ones get 0 unseen; a step that a judge rates twice without a
number stays unlabelled, and is counted."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.plugins import load_function
from penstock.trainer.prm.step_text import require_digest, scored_texts, text_digest
from penstock.trainer.prm.traces import (
    LabelledTrace,
    Trace,
    append_line,
    cut_torn_line,
    read_lines,
)

Rate = Callable[[str, Trace, int], Awaitable[float | None]]
"""Rates the step with this text, trace and index; None if it cannot."""


@dataclass(slots=True, kw_only=True)
class Labelled:
    num_traces: int = 0
    """Labelled now."""
    num_known: int = 0
    """Traces that were labelled before."""
    num_steps: int = 0
    num_malformed: int = 0
    """Steps that got 0 without being rated."""
    num_unlabelled: int = 0
    """Steps for which no number was given."""


async def label_traces(
    traces: Path, out: Path, rate: Rate, labeller: str, *, concurrency: int = 8
) -> Labelled:
    """Append the labels of every trace that `out` does not have."""
    found, known = Labelled(), _labelled_rows(out, labeller)
    out.parent.mkdir(parents=True, exist_ok=True)
    gate = asyncio.Semaphore(concurrency)
    try:
        async with asyncio.TaskGroup() as tasks:
            for trace in read_lines(traces, Trace):
                if trace.row in known:
                    found.num_known += 1
                    continue
                await gate.acquire()
                work = tasks.create_task(_label(trace, out, rate, labeller, found))
                work.add_done_callback(lambda _: gate.release())
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return found


async def _label(trace: Trace, out: Path, rate: Rate, labeller: str, found: Labelled) -> None:
    labels: list[float | None] = [
        0.0 if step.is_scored and step.malformed else None for step in trace.steps
    ]
    found.num_malformed += labels.count(0.0)
    for index, text in scored_texts(trace.steps).items():
        labels[index] = await rate(text, trace, index)
        found.num_steps += 1
        found.num_unlabelled += labels[index] is None
    append_line(
        out,
        LabelledTrace(
            trace=trace, labels=tuple(labels), labeller=labeller, text_digest=text_digest()
        ),
    )
    found.num_traces += 1


def _labelled_rows(out: Path, labeller: str) -> set[str]:
    """Rows in the file; ConfigError if another labeller, or another form of text, made them."""
    if not out.exists():
        return set()
    cut_torn_line(out)
    rows: set[str] = set()
    for one in read_lines(out, LabelledTrace):
        require_digest(one.text_digest, f"{out}, row {one.trace.row}", "write to a new file")
        if one.labeller != labeller:
            raise ConfigError(
                f"{out} holds labels by {one.labeller}, and these would be by {labeller}; write "
                "them to another file"
            )
        rows.add(one.trace.row)
    return rows


def program_rater(name: str) -> Rate:
    """Labels by a function of the user's: `fn(text, *, trace, step) -> float`."""
    function = load_function(name)

    async def rate(text: str, trace: Trace, index: int) -> float:
        where = f"{name}, row {trace.row}, step {index}"
        try:
            value = float(await asyncio.to_thread(function, text, trace=trace, step=index))
        except Exception as error:  # it is user code
            raise ConfigError(
                f"{where}: {type(error).__name__}: {error}; a labelling function is called as "
                "fn(text, *, trace, step) and returns a number"
            ) from error
        if not 0 <= value <= 1:
            raise ConfigError(f"{where}: returned {value}; a label is a number from 0 to 1")
        return value

    return rate
