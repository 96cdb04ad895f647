# SPDX-License-Identifier: Apache-2.0
"""The three-zone rule: pure arithmetic from waits and rates to the size of the rollout pool.

Trainers wait too much: grow. They hardly wait, and nodes make more than is used: shrink. Else:
hold. Cool-down, step limit and pending joins keep the loop from chasing its own delay. Knows
nothing of nodes, ledgers or launchers, and acts on nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.dataflow.report.figures import (
    BalanceSettings,
    RuleMemory,
    ScalingAction,
    ScalingBranch,
    StepTiming,
)

WAIT_CAP = 0.95
"""A trainer that got nothing at all would ask for infinitely many GPUs."""
ROUNDING_EPS = 1e-9
"""Of floating point: 7 / 0.7 asks for ten GPUs, never for eleven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWindow:
    """The pool as one window saw it."""

    gpus: int
    """Of nodes that are healthy and serve; dead and suspect ones are no capacity."""
    pending_gpus: int
    """Of nodes that joined and are still starting; they are capacity already."""
    wait_fraction: float | None
    """The worst of the policies that share the pool; None when no step was measured."""
    need: float | None
    """Consumed tokens per token the pool could have brought in; None when nothing moved."""
    is_loading_weights: bool
    """Waits of this window are owed to weights being loaded, not to a lack of nodes."""
    window_s: float
    start_s: float
    """p90 of node starts."""
    complete: bool = True

    @property
    def capacity(self) -> int:
        return self.gpus + self.pending_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneVerdict:
    branch: ScalingBranch
    target_gpus: int
    delta_gpus: int
    """Against serving and pending GPUs together; what a launcher would have to do."""
    reason: str
    memory: RuleMemory
    """To be handed in with the next window."""


def wait_fraction(samples: Iterable[StepTiming]) -> float | None:
    """Share of the steps that was waiting; a mean of fractions would let short steps decide."""
    pairs = [(sample.wait_s, sample.step_s) for sample in samples if sample.step_s > 0]
    if not pairs:
        return None
    return min(WAIT_CAP, sum(wait for wait, _ in pairs) / sum(step for _, step in pairs))


def zone(
    gpus: int, wait: float | None, need: float | None, terms: BalanceSettings
) -> tuple[ScalingBranch, int]:
    """Which zone the pool is in, and the size that would balance it, without any damping."""
    if wait is not None and wait > terms.tau_high:
        return ScalingBranch.SCALE_UP, math.ceil(gpus / (1 - min(WAIT_CAP, wait)) - ROUNDING_EPS)
    if wait is not None and wait < terms.tau_low and need is not None:
        target = min(gpus, math.ceil(gpus * terms.rho * need - ROUNDING_EPS))
        return (ScalingBranch.SCALE_DOWN, target) if target < gpus else (ScalingBranch.HOLD, gpus)
    return ScalingBranch.HOLD, gpus


def decide(pool: PoolWindow, memory: RuleMemory, terms: BalanceSettings, now: float) -> ZoneVerdict:
    """What to do after this window; call once per window and keep the verdict's memory."""
    branch, wanted = zone(pool.gpus, pool.wait_fraction, pool.need, terms)
    stay = RuleMemory(
        low_windows=memory.low_windows + 1 if branch is ScalingBranch.SCALE_DOWN else 0,
        last_action=memory.last_action,
        cooldown_until=memory.cooldown_until,
    )
    target = _clamp_target(pool.gpus, wanted, terms)
    delta = target - pool.capacity
    reason = _postpone_reason(branch, pool, stay, terms, now)
    if reason is None and not _is_out_of_bounds(pool, terms):
        reason = _hold_reason(branch, delta, pool, terms)
    if reason is not None:
        return ZoneVerdict(
            branch=ScalingBranch.HOLD,
            target_gpus=pool.gpus,
            delta_gpus=0,
            reason=reason,
            memory=stay,
        )
    acted = ScalingBranch.SCALE_UP if delta > 0 else ScalingBranch.SCALE_DOWN
    action = ScalingAction(branch=acted, at=now, gpus_before=pool.gpus, target_gpus=target)
    return ZoneVerdict(
        branch=acted,
        target_gpus=target,
        delta_gpus=delta,
        reason=_act_reason(branch, acted, pool, terms),
        memory=RuleMemory(last_action=action, cooldown_until=now + _cooldown_s(pool, terms)),
    )


def _clamp_target(gpus: int, wanted: int, terms: BalanceSettings) -> int:
    """At most half of the pool at once, and never out of its declared size."""
    step = max(1, math.ceil(terms.max_step * gpus - ROUNDING_EPS))
    target = max(terms.min_gpus, min(gpus + step, max(gpus - step, wanted)))
    return target if terms.max_gpus is None else min(terms.max_gpus, target)


def _is_out_of_bounds(pool: PoolWindow, terms: BalanceSettings) -> bool:
    return pool.capacity < terms.min_gpus or (
        terms.max_gpus is not None and pool.capacity > terms.max_gpus
    )


def _cooldown_s(pool: PoolWindow, terms: BalanceSettings) -> float:
    start_s = max(pool.start_s, terms.node_start_s)
    return max(terms.cooldown_windows * pool.window_s, terms.cooldown_starts * start_s)


def _postpone_reason(
    branch: ScalingBranch, pool: PoolWindow, memory: RuleMemory, terms: BalanceSettings, now: float
) -> str | None:
    """Why this is no time to act, whatever the zone."""
    if not pool.complete:
        return "the first window is not complete yet"
    if now < memory.cooldown_until:
        return f"cooling down for another {memory.cooldown_until - now:.0f} s"
    if pool.is_loading_weights:
        return "nodes spent the window loading weights; more nodes would load them too"
    if branch is ScalingBranch.SCALE_DOWN and memory.low_windows < terms.low_windows:
        return f"in the low zone for {memory.low_windows} of {terms.low_windows} windows"
    return None


def _hold_reason(
    branch: ScalingBranch, delta: int, pool: PoolWindow, terms: BalanceSettings
) -> str | None:
    """Why the pool stays as it is although its time has come, or None."""
    wait = pool.wait_fraction
    if branch is ScalingBranch.SCALE_UP and delta <= 0:
        starting = f"GPUs are starting ({pool.pending_gpus})"
        why = starting if pool.pending_gpus else "max_gpus is reached"
        return f"trainers wait {wait:.1%} of their time, but {why}"
    if branch is ScalingBranch.SCALE_DOWN and delta >= 0:
        return "the pool is larger than needed, but min_gpus is reached"
    if branch is not ScalingBranch.HOLD:
        return None
    if wait is None:
        return "no trainer step was measured in this window"
    if wait < terms.tau_low:
        return f"trainers wait {wait:.1%} of their time, and what nodes make is used"
    return f"trainers wait {wait:.1%} of their time, within the thresholds"


def _act_reason(
    branch: ScalingBranch, acted: ScalingBranch, pool: PoolWindow, terms: BalanceSettings
) -> str:
    if branch is not acted:
        most = "any number" if terms.max_gpus is None else terms.max_gpus
        return f"the pool has {pool.capacity} GPUs; declared are {terms.min_gpus} to {most}"
    if branch is ScalingBranch.SCALE_UP:
        return f"trainers wait {pool.wait_fraction:.1%} of their time, over {terms.tau_high:.0%}"
    return (
        f"trainers wait {pool.wait_fraction:.1%} of their time, and "
        f"{pool.need:.0%} of what the pool can bring in is used"
    )
