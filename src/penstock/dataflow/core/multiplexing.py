# SPDX-License-Identifier: Apache-2.0
"""When resources that roll out and train change over: a state machine without clock and I/O.

They roll out until enough admitted data waits, train it, and return. Each change has a trigger,
for the record. Knows neither nodes nor processes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    ROLLOUT = "rollout"
    TRAIN = "train"


class SwitchTrigger(StrEnum):
    """Why generation was interrupted, or resumed."""

    SAMPLES = "samples"
    """Interrupted: enough admitted data waits for the trainer."""
    TIMEOUT = "timeout"
    """Interrupted: less than that waits, for too long already."""
    NEW_WEIGHTS = "new_weights"
    """Interrupted while an engine loads a version; running answers continue under it."""
    TAG_CHANGED = "tag_changed"
    """Interrupted: an operator took the tag `rollout` away."""
    TAG_RETURNED = "tag_returned"
    """Resumed: the trainer has trained what waited, or an operator gave `rollout` back."""
    RESOURCE_ADDED = "resource_added"
    """Resumed: a resource joined, and goes on with what waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisitSpec:
    """How long a resource rolls out before it trains."""

    batches: int = 1
    """Complete batches that must wait. More of them mean fewer changes, and older data."""
    timeout_s: float = 60.0
    """Seconds after which one batch is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    phase: Phase
    trigger: SwitchTrigger


class Multiplexer:
    """The phase of one policy's shared resources."""

    def __init__(self, spec: VisitSpec, now: float) -> None:
        self.phase = Phase.ROLLOUT
        self.since = now
        self.trigger: SwitchTrigger | None = None
        """Of the last change."""
        self._spec = spec

    def decide(
        self, *, ready_batches: int, batches_left: int, is_training: bool, now: float
    ) -> Switch | None:
        """Change over if it is time to. `batches_left`: of the run; the last ones wait for no
        more."""
        switch = self._due(ready_batches, batches_left, is_training, now)
        if switch is not None:
            self.phase, self.since, self.trigger = switch.phase, now, switch.trigger
        return switch

    def _due(self, ready: int, left: int, is_training: bool, now: float) -> Switch | None:
        if self.phase is Phase.TRAIN:
            if is_training or ready:
                return None
            return Switch(phase=Phase.ROLLOUT, trigger=SwitchTrigger.TAG_RETURNED)
        if ready and ready >= min(self._spec.batches, left):
            return Switch(phase=Phase.TRAIN, trigger=SwitchTrigger.SAMPLES)
        if ready and now - self.since >= self._spec.timeout_s:
            return Switch(phase=Phase.TRAIN, trigger=SwitchTrigger.TIMEOUT)
        return None


def batches_per_visit(
    *,
    switch_s: float,
    step_s: float,
    max_staleness: int,
    switching: float = 1.0,
    max_share: float = 0.02,
) -> int:
    """The fewest batches per visit for which both changes together take at most `max_share` of the
    time of all resources, of which the share `switching` changes over. Never more than may wait
    under `max_staleness`."""
    needed = math.ceil(2 * switch_s * switching / (max_share * step_s) - 1e-9)
    return max(1, min(needed, max_staleness))
