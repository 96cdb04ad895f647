# SPDX-License-Identifier: Apache-2.0
"""Alarms for batches without a learning signal, with the cause, and for engines far from the
trainer.

Owns the cause of one batch without a signal, and the counts of consecutive bad batches. Raises
nothing and stops nothing: a run may recover, and the operator decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.trainer.learner import SkipReason, Stats
from penstock.trainer.signals.mismatch import pool_mismatch

ALARM_AFTER = 3
"""Consecutive batches without a signal before the first alarm; then one at each doubling."""
MAX_GAP = 1.0
"""Mean |log ratio| of fresh tokens beyond which engine and trainer do not hold the same model."""
MAX_K3_PER_VERSION = 0.1
"""Per version: far beyond what a policy should move in one step."""
EXCLUDED = "rows/excluded"
"""The metric that counts rows masked by a stage."""


class Cause(StrEnum):
    NO_TOKENS = "no_tokens"
    """No row had a token that this policy trains."""
    EXCLUDED = "excluded"
    """A stage of the pipeline masked every row."""
    EQUAL_REWARDS = "equal_rewards"
    """In every group all answers earned the same reward."""
    GAP = "gap"
    """Engine and trainer disagree on the same weights by more than any clip allows."""
    REJECTED = "rejected"
    """The mismatch correction rejected every token."""
    ALL_CLIPPED = "all_clipped"
    """Every token with an advantage was outside its bound."""
    SKIPPED = "skipped"
    """The batch was skipped for another reason."""


_MESSAGES: Mapping[Cause, str] = {
    Cause.NO_TOKENS: (
        "no row had a token to train; check the outcomes of rollouts (`penstock status`, then "
        "`penstock explain GROUP`): answers may be empty, rejected, or made by another policy"
    ),
    Cause.EXCLUDED: (
        "every row was masked by a stage that writes `excluded`, and none is left to train; the "
        "one of dapo does so with answers that reach the limit: raise sampling.max_tokens, or let "
        "it punish them (options: {how: punish})"
    ),
    Cause.EQUAL_REWARDS: (
        "in every group all answers earned the same reward, so no answer is better than another; "
        "check the reward function on a few answers by hand, mix in easier or harder tasks, or "
        "admit only groups that differ (`dataflow.rules: [{admit: reward-spread}]`)"
    ),
    Cause.GAP: (
        "engine and trainer give the same tokens very different probabilities (mean |log ratio| "
        f"above {MAX_GAP:g}); they may hold different weights, tokenizers or sampling rules: "
        "compare the versions in `penstock status` and the gap by node in the metrics"
    ),
    Cause.REJECTED: (
        "the mismatch correction rejected every token: the engine's log-probs are too far from the "
        "trainer's; compare the versions in `penstock status` and the precision of the engine with "
        "training.precision before you widen the correction's bounds"
    ),
    Cause.ALL_CLIPPED: (
        "every token was outside the clip bounds; the data is too old or the steps are too long: "
        "lower max_staleness or learning_rate, or use an objective made for stale data "
        "(decoupled, m2po)"
    ),
    Cause.SKIPPED: (
        "every update was skipped; the reason is in the commits (`penstock status`): gradients "
        "that are not finite need a lower learning_rate or float32"
    ),
}


def cause_of(stats: Stats) -> Cause | None:
    """Why a batch had no learning signal, None if it had one."""
    values = stats.values
    if not values.get("tokens/trained"):
        return Cause.EXCLUDED if values.get(EXCLUDED) else Cause.NO_TOKENS
    if stats.skipped is SkipReason.REJECTED:
        return Cause.REJECTED
    if values.get("signal/informative_groups") == 0:
        return Cause.EQUAL_REWARDS
    if not pool_mismatch(stats.mismatches).mean_abs <= MAX_GAP:
        return Cause.GAP
    if values.get("signal/clipped", 0.0) >= 1:
        return Cause.ALL_CLIPPED
    return Cause.SKIPPED if stats.skipped else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSignalStreak:
    """Consecutive batches without a signal, by cause; part of the checkpoint."""

    counts: Mapping[Cause, int] = field(default_factory=dict[Cause, int])

    @property
    def num_batches(self) -> int:
        return sum(self.counts.values())

    def updated(self, cause: Cause | None) -> NoSignalStreak:
        if cause is None:
            return NoSignalStreak()
        return NoSignalStreak(counts={**self.counts, cause: self.counts.get(cause, 0) + 1})

    @property
    def alarm(self) -> str | None:
        """The alarm to raise now, if any."""
        num_batches = self.num_batches
        if not _is_due(num_batches):
            return None
        cause = max(self.counts, key=lambda one: self.counts[one])
        others = "".join(f", {n} {one.value}" for one, n in self.counts.items() if one != cause)
        return (
            f"{num_batches} consecutive batches had no learning signal "
            f"({self.counts[cause]} {cause.value}{others}); {_MESSAGES[cause]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergenceStreak:
    """Consecutive batches whose tokens came from a policy far from the one that trains them."""

    num_batches: int = 0
    k3: float = 0.0
    """Of the last batch, per version of staleness."""

    def updated(self, k3: float, staleness: float) -> DivergenceStreak:
        """`k3` between engines and trainer, over a batch's tokens with the smallest staleness."""
        per_version = k3 / max(staleness, 1.0)
        if per_version <= MAX_K3_PER_VERSION:
            return DivergenceStreak()
        return DivergenceStreak(num_batches=self.num_batches + 1, k3=per_version)

    @property
    def alarm(self) -> str | None:
        if not _is_due(self.num_batches):
            return None
        return (
            f"engines and trainer are far apart: {self.num_batches} consecutive batches have a k3 "
            f"of {self.k3:.2g} per version between sampling and training; the steps "
            "are too long (lower learning_rate), or they do not reach the engines (compare "
            "versions in `penstock status`, and the precision of the engine with "
            "training.precision)"
        )


def _is_due(num_batches: int) -> bool:
    """At 3 batches, at 6, at 12, …"""
    rounds, rest = divmod(num_batches, ALARM_AFTER)
    return rounds > 0 and not rest and not rounds & (rounds - 1)
