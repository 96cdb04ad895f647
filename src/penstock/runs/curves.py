# SPDX-License-Identifier: Apache-2.0
"""Curves of a run's metrics by step, from its metrics.jsonl.

Owns which records count: of steps that a resumed trainer repeated, the newer ones. Draws nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from penstock.bounds import MAX_INT
from penstock.durable import open_regular
from penstock.errors import ConfigError
from penstock.plugins import did_you_mean

REWARD = "reward/mean"
MAX_LINE_BYTES = 16 << 20
"""A step of a thousand metrics has 50 kB."""
MAX_NAMES = 4096
"""Metrics of a file that are listed, those named first: it may belong to another user."""
IDENTITY = frozenset({"time", "policy", "number", "seq", "incarnation", "skipped", "alarm"})
"""Keys of a record that are no metrics."""
NUMBERS = ("number", "seq", "time")
REQUIRED = frozenset({"policy", *NUMBERS})


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsRecord:
    """One committed batch of one policy, with the metrics asked for."""

    policy: str
    number: int
    """The step that it led to."""
    seq: int
    time: float
    """Unix time."""
    skipped: str
    values: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One metric of one policy of one run."""

    run: str
    policy: str
    metric: str
    steps: list[int] = field(default_factory=list[int])
    values: list[float] = field(default_factory=list[float])
    times: list[float] = field(default_factory=list[float])
    """Unix time of each point."""


def read_records(path: Path, metrics: Collection[str]) -> list[MetricsRecord]:
    """The records of a metrics.jsonl with these metrics, each step as it was last trained; empty if
    there is no such file. A half-written last line is left out."""
    kept: dict[str, list[MetricsRecord]] = {}
    names = frozenset(metrics)
    for found in _steps(path):
        record = _record(found, names)
        records = kept.setdefault(record.policy, [])
        while records and records[-1].seq >= record.seq:
            records.pop()
        records.append(record)
    return [record for records in kept.values() for record in records]


def metric_names(path: Path) -> set[str]:
    """The metrics that a metrics.jsonl has, at most MAX_NAMES."""
    names = (name for found in _steps(path) for name in found if _is_metric(name, found[name]))
    known: set[str] = set()
    for name in names:
        known.add(name)
        if len(known) == MAX_NAMES:
            break
    return known


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """The complete lines of a metrics.jsonl, one at a time: a long run has more than fits into
    memory. Nothing if there is no such file, and nothing after a line without end: the run may
    belong to another user. ConfigError for a link or a pipe."""
    try:
        lines = open_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    with lines:
        while line := lines.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES:
                return
            try:
                found: object = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(found, dict):
                yield cast("dict[str, object]", found)


def _steps(path: Path) -> Iterator[dict[str, object]]:
    """Lines of steps; one whose numbers are none is left out, as a damaged line is."""
    return (
        found
        for found in read_lines(path)
        if found.keys() >= REQUIRED and all(_is_number(found[name]) for name in NUMBERS)
    )


def _is_number(value: object) -> bool:
    """Neither infinite, nor NaN, nor beyond what a float holds."""
    return isinstance(value, int | float) and -MAX_INT <= value <= MAX_INT


def _record(found: Mapping[str, object], metrics: frozenset[str]) -> MetricsRecord:
    return MetricsRecord(
        policy=str(found["policy"]),
        number=int(cast("int", found["number"])),
        seq=int(cast("int", found["seq"])),
        time=float(cast("float", found["time"])),
        skipped=str(found.get("skipped") or ""),
        values={
            name: float(cast("float", found[name]))
            for name in metrics.intersection(found)
            if _is_metric(name, found[name])
        },
    )


def _is_metric(name: str, value: object) -> bool:
    is_number = isinstance(value, float) or (isinstance(value, int) and _is_number(value))
    return name not in IDENTITY and is_number


def resolve_metric(name: str, known: Sequence[str]) -> str:
    """The metric with this name, or NAME/mean: `reward` is `reward/mean`."""
    for candidate in (name, f"{name}/mean"):
        if candidate in known:
            return candidate
    near = did_you_mean(name, tuple(known))
    hint = f'did you mean "{near}"? ' if near else ""
    raise ConfigError(f"unknown metric {name!r}; {hint}Available: {', '.join(known)}")


def make_curves(run: str, records: Sequence[MetricsRecord], metric: str) -> list[Curve]:
    """A curve per policy that has this metric; skipped batches have no point."""
    curves: dict[str, Curve] = {}
    for record in records:
        value = record.values.get(metric)
        if value is None or record.skipped:
            continue
        curve = curves.setdefault(
            record.policy, Curve(run=run, policy=record.policy, metric=metric)
        )
        curve.steps.append(record.number)
        curve.values.append(value)
        curve.times.append(record.time)
    return list(curves.values())


def reward_by_step(path: Path) -> dict[str, dict[int, float]]:
    """Mean reward by step, by policy."""
    found: dict[str, dict[int, float]] = {}
    for record in read_records(path, (REWARD,)):
        if REWARD in record.values:
            found.setdefault(record.policy, {})[record.number] = record.values[REWARD]
    return found
