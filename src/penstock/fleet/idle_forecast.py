# SPDX-License-Identifier: Apache-2.0
"""The share of resource time that a pipeline leaves idle, predicted from measured rates.

Means only: what a single answer takes is in `tail_s`. The time account of a run has the truth."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Pipeline(StrEnum):
    NAIVE = "naive"
    """Generate a batch, then train it; each on separate resources."""
    MICRO_BATCH = "micro_batch"
    """The same, but training begins with the first finished groups."""
    OFF_POLICY = "off_policy"
    """Generation goes on while a batch trains, as far as staleness allows."""
    MULTIPLEXED = "multiplexed"
    """Resources that roll out train as well, when enough data waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """One batch, in seconds of one resource."""

    rollout_s: float
    train_s: float
    switch_s: float = 0.0
    """From generating to training, or back; the resource does neither."""
    tail_s: float = 0.0
    """From the moment that no more answers of a batch wait, until its last one ends."""
    micro_batches: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagging:
    """How many resources have which tags."""

    rollout: int = 0
    train: int = 0
    both: int = 0

    @property
    def total(self) -> int:
        return self.rollout + self.train + self.both


def predict_idle(
    pipeline: Pipeline, load: Load, tagging: Tagging, *, batches_per_visit: int = 1
) -> float:
    """Changes over count as idle."""
    step_s = (
        _shared_step_s(load, tagging, batches_per_visit)
        if pipeline is Pipeline.MULTIPLEXED
        else dedicated_step_s(pipeline, load, tagging)
    )
    return 1 - (load.rollout_s + load.train_s) / (tagging.total * step_s)


def dedicated_step_s(pipeline: Pipeline, load: Load, tagging: Tagging) -> float:
    """Seconds of a step when no resource does both."""
    generate_s, train_s = load.rollout_s / tagging.rollout, load.train_s / tagging.train
    if pipeline is Pipeline.OFF_POLICY:
        return max(generate_s, train_s)
    generate_s += load.tail_s
    if pipeline is Pipeline.NAIVE:
        return generate_s + train_s
    last_s = train_s / load.micro_batches
    return max(generate_s + last_s, generate_s / load.micro_batches + train_s)


def _shared_step_s(load: Load, tagging: Tagging, batches_per_visit: int) -> float:
    """Everybody is busy unless some cannot do what is left: those that only roll out, or only
    train, work at most all of the time."""
    work_s = load.rollout_s + load.train_s
    train_s = load.train_s / (tagging.train + tagging.both)
    if train_s >= work_s / tagging.total:
        return train_s  # those that do both never return
    switching_s = 2 * load.switch_s * tagging.both / batches_per_visit
    shared_s = (work_s + switching_s) / tagging.total
    return max(shared_s, load.rollout_s / (tagging.rollout + tagging.both))


def has_perfect_schedule(load: Load, tagging: Tagging) -> bool:
    """Whether some schedule without switching cost keeps everybody busy."""
    step_s = (load.rollout_s + load.train_s) / tagging.total
    fits_rollout = tagging.rollout * step_s <= load.rollout_s + 1e-9
    return fits_rollout and tagging.train * step_s <= load.train_s + 1e-9
