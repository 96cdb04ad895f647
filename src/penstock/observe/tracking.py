# SPDX-License-Identifier: Apache-2.0
"""What a tracker is: the interface behind trackio, W&B, TensorBoard, MLflow and yours.

Owns the form of a point and the choice of a tracker by name. Reads no ledger and keeps no cursor:
`penstock.runs.tracking` does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.plugins import TRACKER_GROUP, builtin_names, load_object
from penstock.types import Trajectory

_PACKAGE = "penstock.observe.trackers"
OPENTELEMETRY = "opentelemetry"
"""The one tracker of rollouts."""
PROJECT = "penstock"
"""The project, or experiment, of runs whose user names no other in the tracker's own variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """One policy of a run, as a tracker sees it: a separate run, since policies step apart."""

    id: str
    """Unique, and never changes: letters and digits. A new run folder is a new id."""
    name: str
    """For people: the run's name, with the policy's where a run trains several."""
    run: str
    """Name of the penstock run: the group of its policies."""
    policy: str
    folder: Path
    """The run folder; a tracker that writes files makes a folder in it."""
    config: Mapping[str, Any]
    """The run's config without secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """All metrics of one step, or of one evaluation."""

    id: str
    """Unique in its run, and the same when it is sent again."""
    index: int
    """0, 1, 2, … in the order of sending."""
    step: int
    at: float
    """Unix time of the step's commit."""
    values: Mapping[str, float]
    """Finite numbers, by the names in docs/reference/metrics.md."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One rollout of training: what OPENTELEMETRY gets instead of points."""

    trajectory: Trajectory
    workflow: str
    source: str
    task_key: str
    reward: float | None
    """Of the rollout, or of the stage that scored it."""


class Tracker(Protocol):
    """Made of a `TrackedRun`. Used by one thread; it may be killed at any moment."""

    def send(self, points: Sequence[Point]) -> None:
        """Store these points. Whatever it raises, all of them are sent again later, so a point that
        is stored already must not appear twice."""
        ...

    def close(self) -> None: ...


def load_tracker(name: str) -> Callable[[TrackedRun], Tracker]:
    """The class, or function, that makes this tracker."""
    if name in builtin_names(_PACKAGE):
        return load_object(f"{_PACKAGE}.{name}:TRACKER")
    return load_object(name, TRACKER_GROUP)
