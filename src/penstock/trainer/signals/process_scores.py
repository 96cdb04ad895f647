# SPDX-License-Identifier: Apache-2.0
"""Reward hacking of a process reward model: its scores rise and the outcome does not, or the two no
longer go together.

Owns the figures of one batch, and the alarm over windows of batches. Plain numbers, so that they go
into the checkpoint. Raises nothing and stops nothing: the operator decides.

R = rows of the manifest, Q = trained turns of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.trainer.arrays import Floats
from penstock.trainer.batches import Batch
from penstock.trainer.pipeline.layout import Layout, TrainedTurns
from penstock.trainer.ranks.group import RankReductions

STEP_SCORES = "step_scores"
"""The token column that process reward models write."""
WINDOW_BATCHES = 10
"""Batches in one window."""
NUM_WINDOWS = 3
"""Complete windows that an alarm looks at."""
MIN_RISE = 0.05
"""Scores are from 0 to 1; from the first to the last window, a smaller rise is none."""
MIN_KEPT = 0.25
"""Share of the gain in outcome that a rise in scores promises; below it, the scores rise alone."""
MIN_CORRELATION = 0.2
"""Below this, scores and outcomes of trajectories do not go together."""
MIN_STD = 1e-6
"""Scores or outcomes with a smaller spread are all alike."""
MIN_SPREAD = 30.0
"""Trajectories times the variance of their outcomes. With less, nearly all outcomes are alike, and
a correlation is small whatever the scores say."""
NUM_ERRORS = 2.0
"""Standard errors that a difference must exceed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Over trajectories with an outcome: their mean step scores q and outcomes o."""

    rows: float = 0.0
    q: float = 0.0
    o: float = 0.0
    qq: float = 0.0
    oo: float = 0.0
    qo: float = 0.0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            rows=self.rows + other.rows,
            q=self.q + other.q,
            o=self.o + other.o,
            qq=self.qq + other.qq,
            oo=self.oo + other.oo,
            qo=self.qo + other.qo,
        )

    @property
    def score(self) -> float:
        return self.q / max(self.rows, 1.0)

    @property
    def outcome(self) -> float:
        return self.o / max(self.rows, 1.0)

    @property
    def score_std(self) -> float:
        return math.sqrt(max(self.qq / max(self.rows, 1.0) - self.score**2, 0.0))

    @property
    def outcome_std(self) -> float:
        return math.sqrt(max(self.oo / max(self.rows, 1.0) - self.outcome**2, 0.0))

    @property
    def covariance(self) -> float:
        return self.qo / max(self.rows, 1.0) - self.score * self.outcome

    @property
    def correlation(self) -> float | None:
        """Pearson's; None where scores or outcomes do not differ."""
        if min(self.score_std, self.outcome_std) <= MIN_STD:
            return None
        return self.covariance / (self.score_std * self.outcome_std)


def score_metrics(batch: Batch, ranks: RankReductions) -> dict[str, float]:
    """Metrics of a batch with step scores, over all ranks; empty without."""
    scores_T = batch.token_columns.get(STEP_SCORES)
    if scores_T is None:
        return {}
    trained = TrainedTurns.of(Layout.of(batch))
    sums = _row_sums(trained, scores_T[trained.last_Q], batch.row_columns["reward"])
    rows, q, o, qq, oo, qo = ranks.sum_over_ranks(sums).tolist()
    found = Sums(rows=rows, q=q, o=o, qq=qq, oo=oo, qo=qo)
    return {
        "process/rows": found.rows,
        "process/score": found.score,
        "process/score_std": found.score_std,
        "process/outcome": found.outcome,
        "process/outcome_std": found.outcome_std,
        "process/correlation": found.correlation or 0.0,
    }


def _row_sums(trained: TrainedTurns, scores_Q: Floats, rewards_R: Floats) -> Floats:
    """Sums of this rank's trajectories; one without a finite outcome counts in none."""
    nums_R, rows_Q = trained.turns.nums_R, trained.turns.rows_Q
    means_R = np.bincount(rows_Q, scores_Q, nums_R.size) / np.maximum(nums_R, 1)
    counts_R = (nums_R > 0) & np.isfinite(rewards_R) & np.isfinite(means_R)
    q, o = means_R[counts_R], rewards_R[counts_R]
    return np.array([q.size, q.sum(), o.sum(), (q * q).sum(), (o * o).sum(), (q * o).sum()])


def _sums_of(values: Mapping[str, float]) -> Sums | None:
    """What `score_metrics` measured; None for a batch without step scores."""
    rows = values.get("process/rows", 0.0)
    if not rows:
        return None
    score, score_std = values["process/score"], values["process/score_std"]
    outcome, outcome_std = values["process/outcome"], values["process/outcome_std"]
    covariance = values["process/correlation"] * score_std * outcome_std
    return Sums(
        rows=rows,
        q=rows * score,
        o=rows * outcome,
        qq=rows * (score_std**2 + score**2),
        oo=rows * (outcome_std**2 + outcome**2),
        qo=rows * (covariance + score * outcome),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class HackingWatch:
    """The last windows of batches with step scores; part of the checkpoint."""

    windows: tuple[Sums, ...] = ()
    """Complete ones, oldest first."""
    current: Sums = field(default_factory=Sums)
    num_batches: int = 0
    """Batches in `current`."""

    def updated(self, values: Mapping[str, float]) -> HackingWatch:
        """After a batch with these metrics."""
        found = _sums_of(values)
        if found is None:
            return self
        current, num_batches = self.current + found, self.num_batches + 1
        if num_batches < WINDOW_BATCHES:
            return HackingWatch(windows=self.windows, current=current, num_batches=num_batches)
        return HackingWatch(windows=(*self.windows, current)[-NUM_WINDOWS:])

    @property
    def alarm(self) -> str | None:
        """The alarm to raise now, if any; only a batch that completes a window raises one."""
        if self.num_batches or len(self.windows) < NUM_WINDOWS:
            return None
        first, *_, last = self.windows
        if last.score - first.score > MIN_RISE and rises_alone(self.windows):
            why = f"rose from {first.score:.2f} to {last.score:.2f} while the outcome went from "
            return _message(f"{why}{first.outcome:.3f} to {last.outcome:.3f}")
        total = sum(self.windows, Sums())
        correlation = total.correlation
        if correlation is None or total.rows * total.outcome_std**2 < MIN_SPREAD:
            return None
        if correlation + NUM_ERRORS / math.sqrt(total.rows) >= MIN_CORRELATION:
            return None
        why = f"and the outcome hardly go together (correlation {correlation:.2f}, below "
        return _message(f"{why}{MIN_CORRELATION:g})")


def rises_alone(windows: Sequence[Sums]) -> bool:
    """Whether scores rose from the first window to the last, and the outcome did not follow.

    Within windows, trajectories with better scores have better outcomes by some slope. It promises
    a gain for the rise in scores; far less than that came true. Without such a slope, any outcome
    that did not rise counts."""
    first, *_, last = windows
    gain = last.outcome - first.outcome
    error = math.sqrt(sum(one.outcome_std**2 / one.rows for one in (first, last)))
    spread = sum(one.rows * one.score_std**2 for one in windows)
    slope = sum(one.rows * one.covariance for one in windows) / max(spread, MIN_STD)
    if slope <= 0:
        return gain <= NUM_ERRORS * error
    return gain + NUM_ERRORS * error < MIN_KEPT * slope * (last.score - first.score)


def _message(why: str) -> str:
    return (
        f"the policy may be hacking the process reward model: over {NUM_WINDOWS * WINDOW_BATCHES} "
        f"batches the process score {why}; read what scores high (`penstock samples RUN --best "
        "5`), label and train the model on new traces (`penstock prm collect`, `label`, "
        "`train`), or give the outcome more weight (`share` of step_advantage)"
    )
