# SPDX-License-Identifier: Apache-2.0
"""Collects traces: the stored trajectories of a run as text, step by step, with their outcome.

Reads the run's files; changes nothing. A trajectory whose payload was freed has no text and is
counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.runs.decoded import Decoder
from penstock.runs.history import Run
from penstock.runs.prm.steps import steps_of
from penstock.runs.recorded_trajectory import PayloadState
from penstock.trainer.prm.traces import Trace, write_lines
from penstock.types import OutcomeKind

SCORED_OUTCOMES = (OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED)


@dataclass(slots=True, kw_only=True)
class Collected:
    """What was written, and what was left out."""

    num_traces: int = 0
    num_steps: int = 0
    num_malformed: int = 0
    """Of these steps."""
    num_failed: int = 0
    """Trajectories of failed or cancelled rollouts, which have no outcome to learn from."""
    num_without_text: int = 0
    """Trajectories whose payload was freed, forgotten or is unreadable."""


def collect_traces(
    run: Run,
    out: Path,
    *,
    steps: tuple[int | None, int | None] | None = None,
    limit: int | None = None,
) -> Collected:
    """Write the traces of a run. `steps`: only what these training steps trained; `limit`: at most
    this many trajectories."""
    found = Collected()
    write_lines(out, _traces(run, steps, limit, found))
    return found


def _traces(
    run: Run, steps: tuple[int | None, int | None] | None, limit: int | None, found: Collected
) -> Iterator[Trace]:
    decoder, policies = Decoder(run.folder), frozenset(run.config.trained)
    for one in run.trajectories(steps=steps):
        if limit is not None and found.num_traces >= limit:
            return
        if one.outcome not in SCORED_OUTCOMES:
            found.num_failed += 1
            continue
        if one.state is not PayloadState.STORED or one.payload is None:
            found.num_without_text += 1
            continue
        made = steps_of(one.payload, decoder, policies)
        found.num_traces += 1
        found.num_steps += sum(step.is_scored for step in made)
        found.num_malformed += sum(step.is_scored and bool(step.malformed) for step in made)
        yield Trace(
            row=one.row_id,
            group=one.group_id,
            task=one.task_payload,
            outcome=one.outcome.value,
            reward=one.reward,
            steps=made,
        )
