# SPDX-License-Identifier: Apache-2.0
"""The three-zone scaling rule: computes the size of the rollout pool from waits and rates.

Scale up if trainers wait too much; scale down if they hardly wait and nodes have spare capacity;
otherwise hold. Cooldown, step limit and pending nodes prevent oscillation. Pure: knows nothing
about nodes, ledgers or launchers, and does not act."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.dataflow.report.figures import BalanceSettings, RuleMemory, StepTiming
from penstock.dataflow.report.shape import ActionReport, ScalingBranch

WAIT_CAP = 0.95
"""Upper bound of the wait fraction: at 1.0 the target would be infinite."""
ROUNDING_EPS = 1e-9
"""Guards against floating-point error: 7 / 0.7 must give ten GPUs, not eleven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWindow:
    """The pool in one window."""

    gpus: int
    """GPUs of healthy nodes with a live engine; dead and suspect nodes do not count."""
    pending_gpus: int
    """GPUs of nodes that are still starting; they count as capacity."""
    wait_fraction: float | None
    """The highest of the policies that share the pool; None if no step was measured."""
    need: float | None
    """Share of the pool's capacity that was used; None if no data was consumed."""
    is_loading_weights: bool
    """Waits in this window are caused by loading weights, not by a lack of nodes."""
    window_s: float
    start_s: float
    """90th percentile of node start times."""
    complete: bool = True

    @property
    def capacity(self) -> int:
        return self.gpus + self.pending_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class ZoneVerdict:
    branch: ScalingBranch
    target_gpus: int
    delta_gpus: int
    """Change relative to serving and pending GPUs: the number to start or drain."""
    reason: str
    memory: RuleMemory
    """State to pass with the next window."""


def wait_fraction(samples: Iterable[StepTiming]) -> float | None:
    """Total wait divided by total step time; a mean of ratios would overweight short steps."""
    pairs = [(sample.wait_s, sample.step_s) for sample in samples if sample.step_s > 0]
    if not pairs:
        return None
    return min(WAIT_CAP, sum(wait for wait, _ in pairs) / sum(step for _, step in pairs))


def zone(
    gpus: int, wait: float | None, need: float | None, terms: BalanceSettings
) -> tuple[ScalingBranch, int]:
    """The zone of the pool, and the size that would balance it, without damping."""
    if wait is not None and wait > terms.tau_high:
        needed = gpus / (1 - min(WAIT_CAP, wait))
        return ScalingBranch.SCALE_UP, math.ceil(terms.rho * needed - ROUNDING_EPS)
    if wait is not None and wait < terms.tau_low and need is not None:
        target = min(gpus, math.ceil(gpus * terms.rho * need - ROUNDING_EPS))
        return (ScalingBranch.SCALE_DOWN, target) if target < gpus else (ScalingBranch.HOLD, gpus)
    return ScalingBranch.HOLD, gpus


def decide(pool: PoolWindow, memory: RuleMemory, terms: BalanceSettings, now: float) -> ZoneVerdict:
    """Decide after a window; call once per window and keep the verdict's memory."""
    branch, balanced_gpus = zone(pool.gpus, pool.wait_fraction, pool.need, terms)
    stay = RuleMemory(
        low_windows=memory.low_windows + 1 if branch is ScalingBranch.SCALE_DOWN else 0,
        last_action=memory.last_action,
        cooldown_until=memory.cooldown_until,
    )
    target = _clamp_target(pool.gpus, balanced_gpus, terms)
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
    action = ActionReport(branch=acted, at=now, gpus_before=pool.gpus, target_gpus=target)
    return ZoneVerdict(
        branch=acted,
        target_gpus=target,
        delta_gpus=delta,
        reason=_act_reason(branch, acted, pool, terms),
        memory=RuleMemory(last_action=action, cooldown_until=now + _cooldown_s(pool, terms)),
    )


def _clamp_target(gpus: int, balanced_gpus: int, terms: BalanceSettings) -> int:
    """Limit the change to `max_step` of the pool and the size to [min_gpus, max_gpus]."""
    step = max(1, math.ceil(terms.max_step * gpus - ROUNDING_EPS))
    target = max(terms.min_gpus, min(gpus + step, max(gpus - step, balanced_gpus)))
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
    """Why not to act now, regardless of the zone."""
    if not pool.complete:
        return "the first window is not complete yet"
    if now < memory.cooldown_until:
        return f"cooling down for another {memory.cooldown_until - now:.0f} s"
    if pool.is_loading_weights:
        return "nodes spent too much of the window loading weights; more nodes would not help"
    if branch is ScalingBranch.SCALE_DOWN and memory.low_windows < terms.low_windows:
        return (
            f"trainers hardly wait; scaling down needs {terms.low_windows} such windows in a row, "
            f"{memory.low_windows} so far"
        )
    return None


def _hold_reason(
    branch: ScalingBranch, delta: int, pool: PoolWindow, terms: BalanceSettings
) -> str | None:
    """Why the pool size stays the same, or None to act."""
    wait = pool.wait_fraction
    if branch is ScalingBranch.SCALE_UP and delta <= 0:
        starting = f"{pool.pending_gpus} GPUs are already starting"
        why = starting if pool.pending_gpus else "the pool is at max_gpus"
        return f"trainers wait {wait:.1%} of their time, but {why}"
    if branch is ScalingBranch.SCALE_DOWN and delta >= 0:
        return "the pool is larger than needed, but already at min_gpus"
    if branch is not ScalingBranch.HOLD:
        return None
    if wait is None:
        return "no trainer step was measured in this window"
    if wait < terms.tau_low:
        return f"trainers wait {wait:.1%} of their time, and the pool has no spare capacity"
    return f"trainers wait {wait:.1%} of their time, within the thresholds"


def _act_reason(
    branch: ScalingBranch, acted: ScalingBranch, pool: PoolWindow, terms: BalanceSettings
) -> str:
    if branch is not acted:
        bounds = f"min_gpus {terms.min_gpus}"
        bounds += "" if terms.max_gpus is None else f", max_gpus {terms.max_gpus}"
        return f"pool size {pool.capacity} is outside its bounds ({bounds})"
    if branch is ScalingBranch.SCALE_UP:
        return f"trainers wait {pool.wait_fraction:.1%} of their time, above {terms.tau_high:.0%}"
    return (
        f"trainers wait only {pool.wait_fraction:.1%} of their time, and only "
        f"{pool.need:.0%} of the pool's capacity is used"
    )
