# SPDX-License-Identifier: Apache-2.0
"""The three-zone rule: pure arithmetic from waits and rates to the size of the rollout pool.

Trainers wait too much: grow. They hardly wait, and nodes make more than is used: shrink. Else:
hold. Cool-down, step limit and pending joins keep the loop from chasing its own delay. Knows
nothing of nodes, ledgers or launchers, and acts on nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.dataflow.report.figures import Action, Branch, Memory, Sample, Terms

WAIT_CAP = 0.95
"""A trainer that got nothing at all would ask for infinitely many GPUs."""
NOISE = 1e-9
"""Of floating point: 7 / 0.7 asks for ten GPUs, never for eleven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The pool as one window saw it."""

    gpus: int
    """Of nodes that are healthy and serve; dead and suspect ones are no capacity."""
    pending_gpus: int
    """Of nodes that joined and are still starting; they are capacity already."""
    wait_fraction: float | None
    """The worst of the policies that share the pool; None when no step was measured."""
    need: float | None
    """Consumed tokens per token the pool could have brought in; None when nothing moved."""
    transferring: bool
    """Waits of this window are owed to weights being loaded, not to a lack of nodes."""
    window_s: float
    start_s: float
    """p90 of node starts."""
    complete: bool = True

    @property
    def capacity(self) -> int:
        return self.gpus + self.pending_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    branch: Branch
    g_target: int
    delta_gpus: int
    """Against serving and pending GPUs together; what a launcher would have to do."""
    reason: str
    memory: Memory
    """To be handed in with the next window."""


def wait_fraction(samples: Iterable[Sample]) -> float | None:
    """Share of the steps that was waiting; a mean of fractions would let short steps decide."""
    pairs = [(sample.wait_s, sample.step_s) for sample in samples if sample.step_s > 0]
    if not pairs:
        return None
    return min(WAIT_CAP, sum(wait for wait, _ in pairs) / sum(step for _, step in pairs))


def zone(gpus: int, wait: float | None, need: float | None, terms: Terms) -> tuple[Branch, int]:
    """Which zone the pool is in, and the size that would balance it, without any damping."""
    if wait is not None and wait > terms.tau_high:
        return Branch.SCALE_UP, math.ceil(gpus / (1 - min(WAIT_CAP, wait)) - NOISE)
    if wait is not None and wait < terms.tau_low and need is not None:
        target = min(gpus, math.ceil(gpus * terms.rho * need - NOISE))
        return (Branch.SCALE_DOWN, target) if target < gpus else (Branch.HOLD, gpus)
    return Branch.HOLD, gpus


def decide(pool: Pool, memory: Memory, terms: Terms, now: float) -> Verdict:
    """What to do after this window; call once per window and keep the verdict's memory."""
    branch, wanted = zone(pool.gpus, pool.wait_fraction, pool.need, terms)
    stay = Memory(
        low_windows=memory.low_windows + 1 if branch is Branch.SCALE_DOWN else 0,
        last_action=memory.last_action,
        cooldown_until=memory.cooldown_until,
    )
    target = _bounded(pool.gpus, wanted, terms)
    delta = target - pool.capacity
    reason = _delay(branch, pool, stay, terms, now)
    if reason is None and not _is_out_of_bounds(pool, terms):
        reason = _content(branch, delta, pool, terms)
    if reason is not None:
        return Verdict(
            branch=Branch.HOLD, g_target=pool.gpus, delta_gpus=0, reason=reason, memory=stay
        )
    acted = Branch.SCALE_UP if delta > 0 else Branch.SCALE_DOWN
    action = Action(branch=acted, at=now, gpus_before=pool.gpus, g_target=target)
    return Verdict(
        branch=acted,
        g_target=target,
        delta_gpus=delta,
        reason=_cause(branch, acted, pool, terms),
        memory=Memory(last_action=action, cooldown_until=now + _cooldown_s(pool, terms)),
    )


def _bounded(gpus: int, wanted: int, terms: Terms) -> int:
    """At most half of the pool at once, and never out of its declared size."""
    step = max(1, math.ceil(terms.max_step * gpus - NOISE))
    target = max(terms.min_gpus, min(gpus + step, max(gpus - step, wanted)))
    return target if terms.max_gpus is None else min(terms.max_gpus, target)


def _is_out_of_bounds(pool: Pool, terms: Terms) -> bool:
    return pool.capacity < terms.min_gpus or (
        terms.max_gpus is not None and pool.capacity > terms.max_gpus
    )


def _cooldown_s(pool: Pool, terms: Terms) -> float:
    start_s = max(pool.start_s, terms.node_start_s)
    return max(terms.cooldown_windows * pool.window_s, terms.cooldown_starts * start_s)


def _delay(branch: Branch, pool: Pool, memory: Memory, terms: Terms, now: float) -> str | None:
    """Why this is no time to act, whatever the zone."""
    if not pool.complete:
        return "the first window is not complete yet"
    if now < memory.cooldown_until:
        return f"cooling down for another {memory.cooldown_until - now:.0f} s"
    if pool.transferring:
        return "nodes spent the window loading weights; more nodes would load them too"
    if branch is Branch.SCALE_DOWN and memory.low_windows < terms.low_windows:
        return f"in the low zone for {memory.low_windows} of {terms.low_windows} windows"
    return None


def _content(branch: Branch, delta: int, pool: Pool, terms: Terms) -> str | None:
    """Why the pool stays as it is although its time has come, or None."""
    wait = pool.wait_fraction
    if branch is Branch.SCALE_UP and delta <= 0:
        starting = f"GPUs are starting ({pool.pending_gpus})"
        why = starting if pool.pending_gpus else "max_gpus is reached"
        return f"trainers wait {wait:.1%} of their time, but {why}"
    if branch is Branch.SCALE_DOWN and delta >= 0:
        return "the pool is larger than needed, but min_gpus is reached"
    if branch is not Branch.HOLD:
        return None
    if wait is None:
        return "no trainer step was measured in this window"
    if wait < terms.tau_low:
        return f"trainers wait {wait:.1%} of their time, and what nodes make is used"
    return f"trainers wait {wait:.1%} of their time, within the thresholds"


def _cause(branch: Branch, acted: Branch, pool: Pool, terms: Terms) -> str:
    if branch is not acted:
        most = "any number" if terms.max_gpus is None else terms.max_gpus
        return f"the pool has {pool.capacity} GPUs; declared are {terms.min_gpus} to {most}"
    if branch is Branch.SCALE_UP:
        return f"trainers wait {pool.wait_fraction:.1%} of their time, over {terms.tau_high:.0%}"
    return (
        f"trainers wait {pool.wait_fraction:.1%} of their time, and "
        f"{pool.need:.0%} of what the pool can bring in is used"
    )
