# SPDX-License-Identifier: Apache-2.0
"""Points of a policy for trackers, from the ledger: the metrics of each step and each evaluation.

Owns which of several commits of a batch counts: the first. A trainer that resumes from a checkpoint
trains the same batches again, and no tracker can take a point back. Where the ledger is not a file
(PostgreSQL), reads metrics.jsonl. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from typing import cast

import msgspec

from penstock.dataflow.ledger.recorded import RecordedRun, open_recorded_run
from penstock.dataflow.records import CommitRecord, EvaluationRecord, EvaluationState
from penstock.errors import StoreError
from penstock.fleet.run_folder import RunFolder
from penstock.observe.tracking import Point
from penstock.runs.curves import IDENTITY, read_lines
from penstock.runs.tracker_cursor import SentPoints

PAGE = 200
"""Batches, and evaluations, that are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A commit, or with seq 0 an evaluation."""

    seq: int
    step: int
    at: float
    values: Mapping[str, float]
    """None of a batch that was skipped."""


def next_points(folder: RunFolder, policy: str, sent: SentPoints) -> tuple[list[Point], SentPoints]:
    """The next points of a policy that a tracker lacks, and its cursor after them."""
    try:
        recorded = open_recorded_run(folder.path / "ledger")
    except StoreError:
        found = list(_from_file(folder, policy, sent))
    else:
        with closing(recorded):
            found = [*_commits(recorded, policy, sent), *_evaluations(recorded, policy, sent)]
    points: list[Point] = []
    for one in sorted(found, key=lambda one: (one.at, one.seq)):
        point, sent = _next_point(one, sent)
        points += [] if point is None else [point]
    return points, sent


def _next_point(one: _Found, sent: SentPoints) -> tuple[Point | None, SentPoints]:
    last = sent.seq if one.seq else sent.evaluated
    if (one.seq or one.step) <= last:
        return None, sent
    now = replace(sent, seq=one.seq) if one.seq else replace(sent, evaluated=one.step)
    if not one.values:
        return None, now
    point = Point(
        id=f"batch-{one.seq}" if one.seq else f"eval-{one.step}",
        index=sent.count,
        step=one.step,
        at=one.at,
        values=one.values,
    )
    return point, replace(now, step=max(now.step, one.step), count=sent.count + 1)


def _commits(recorded: RecordedRun, policy: str, sent: SentPoints) -> Iterator[_Found]:
    where = "consumer = :policy AND seq > :seq ORDER BY seq, incarnation LIMIT :num"
    values = {"policy": policy, "seq": sent.seq, "num": PAGE}
    seq = sent.seq
    for commit in recorded.coordinator.read(CommitRecord, where, **values):
        if commit.seq > seq:
            seq = commit.seq
            stats = msgspec.json.decode(commit.stats, type=dict[str, float | None])
            values = {} if commit.skipped else _finite(stats)
            yield _Found(seq=seq, step=commit.number, at=commit.at, values=values)


def _evaluations(recorded: RecordedRun, policy: str, sent: SentPoints) -> Iterator[_Found]:
    where = "policy = :policy AND state = :done AND number > :step ORDER BY number, incarnation"
    found = recorded.coordinator.read(
        EvaluationRecord,
        f"{where} LIMIT {PAGE}",
        policy=policy,
        done=EvaluationState.DONE.value,
        step=sent.evaluated,
    )
    for one in found:
        values = _finite({f"eval/{suite}/avg": score for suite, score in one.scores.items()})
        yield _Found(seq=0, step=one.number, at=one.ended_at, values=values)


def _from_file(folder: RunFolder, policy: str, sent: SentPoints) -> Iterator[_Found]:
    for line in read_lines(folder.metrics):
        if line.get("policy") != policy:
            continue
        seq, step, at = line.get("seq", 0), line.get("number"), line.get("time")
        if isinstance(seq, int) and isinstance(step, int) and isinstance(at, int | float):
            values = {} if line.get("skipped") else _finite(line)
            yield _Found(seq=seq, step=step, at=float(at), values=values)


def _finite(values: Mapping[str, object]) -> dict[str, float]:
    numbers = {
        name: float(cast("float", value))
        for name, value in values.items()
        if name not in IDENTITY and isinstance(value, int | float)
    }
    return {name: value for name, value in numbers.items() if math.isfinite(value)}
