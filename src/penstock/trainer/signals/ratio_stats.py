# SPDX-License-Identifier: Apache-2.0
"""The learning signal of a batch: effective sample size, informative groups, clipped shares, tails
of the ratio. Sums over tokens, so that ranks can add theirs up before they are evaluated.

Pure functions of NumPy arrays over trained tokens at the first update of a batch, before the
weights have moved. Does not know nodes (mismatch.py) or causes (alarms.py).

K = trained tokens of this rank, G = groups of the batch, B = bins.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import numpy as np

from penstock.trainer.arrays import Floats, Ints

MAX_LOG_RATIO = 20.0
"""As in the losses: one absurd record must not make every sum infinite."""
_EDGES_B = np.linspace(-2.0, 2.0, 801)
"""Bins of log ratios; values outside count in the first and the last."""
_QUANTILES = {"q001": 0.001, "q01": 0.01, "q50": 0.5, "q99": 0.99, "q999": 0.999}


def log_ratios(logprobs_K: Floats, sampling_K: Floats) -> Floats:
    """Log-ratio of the current policy to the sampling engine, bounded; NaN counts as the bound."""
    with np.errstate(invalid="ignore", over="ignore"):
        ratios_K = np.subtract(logprobs_K, sampling_K, dtype=np.float64)
    filled_K = np.nan_to_num(ratios_K, nan=MAX_LOG_RATIO)
    return np.clip(filled_K, -MAX_LOG_RATIO, MAX_LOG_RATIO)


@dataclass(frozen=True, slots=True)
class RatioStats:
    """Sums over the ratios of a batch; add two ranks' sums by their `vector`."""

    num_tokens: float
    sum_weights: float
    """Of ratios, which are importance weights."""
    sum_squares: float
    num_up: float
    """Tokens to be made likelier: their advantage is above 0."""
    num_down: float
    num_clipped_up: float
    """Of those, at a ratio above the upper bound: they have no gradient."""
    num_clipped_down: float
    num_beyond: float
    """Outside the bounds on either side, whatever the advantage."""
    counts_B: Floats

    @property
    def vector(self) -> Floats:
        """All of it as one vector, for `sum_over_ranks`."""
        *sums, counts_B = astuple(self)
        return np.concatenate([sums, counts_B])

    @staticmethod
    def from_vector(vector: Floats) -> RatioStats:
        num_bins = _EDGES_B.size - 1
        return RatioStats(*vector[:-num_bins].tolist(), counts_B=vector[-num_bins:])

    @property
    def effective_samples(self) -> float:
        """Effective sample size: n if all tokens have the same weight, 1 if one outweighs all."""
        return self.sum_weights**2 / self.sum_squares if self.sum_squares else 0.0

    @property
    def clipped_share(self) -> float:
        """Of tokens with an advantage."""
        clipped = self.num_clipped_up + self.num_clipped_down
        return clipped / max(self.num_up + self.num_down, 1.0)

    def quantile(self, share: float) -> float:
        """Of log ratios, to half a bin."""
        total = float(self.counts_B.sum())
        if not total:
            return 0.0
        at = int(np.searchsorted(np.cumsum(self.counts_B), share * total, side="left"))
        at = min(at, self.counts_B.size - 1)
        return float(_EDGES_B[at] + _EDGES_B[at + 1]) / 2

    def metrics(self) -> dict[str, float]:
        """For the metrics of the step."""
        num_tokens = max(self.num_tokens, 1.0)
        return {
            "signal/effective_samples": self.effective_samples,
            "signal/effective_share": self.effective_samples / num_tokens,
            "signal/clipped": self.clipped_share,
            "signal/clipped_up": self.num_clipped_up / max(self.num_up, 1.0),
            "signal/clipped_down": self.num_clipped_down / max(self.num_down, 1.0),
            "ratio/beyond": self.num_beyond / num_tokens,
        } | {f"ratio/log_{name}": self.quantile(share) for name, share in _QUANTILES.items()}


def measure_ratios(
    logprobs_K: Floats, sampling_K: Floats, advantages_K: Floats, *, low: float, high: float
) -> RatioStats:
    """A ratio is clipped above 1 + `high` where the advantage is above 0, and below 1 - `low` where
    it is below."""
    log_K = log_ratios(logprobs_K, sampling_K)
    weights_K = np.exp(log_K)
    is_up_K, is_down_K = advantages_K > 0, advantages_K < 0
    is_above_K, is_below_K = weights_K > 1 + high, weights_K < 1 - low
    counts_B, _ = np.histogram(np.clip(log_K, _EDGES_B[0], _EDGES_B[-1]), _EDGES_B)
    return RatioStats(
        num_tokens=float(log_K.size),
        sum_weights=float(weights_K.sum()),
        sum_squares=float(np.square(weights_K).sum()),
        num_up=float(is_up_K.sum()),
        num_down=float(is_down_K.sum()),
        num_clipped_up=float((is_up_K & is_above_K).sum()),
        num_clipped_down=float((is_down_K & is_below_K).sum()),
        num_beyond=float((is_above_K | is_below_K).sum()),
        counts_B=counts_B.astype(np.float64),
    )


def tokens_with_advantage(advantages_K: Floats, groups_K: Ints, num_groups: int) -> Floats:
    """Tokens with an advantage, by group; ranks add theirs up."""
    return np.bincount(groups_K[advantages_K != 0], minlength=num_groups).astype(np.float64)


def informative_share(teaching_G: Floats) -> float:
    """Share of groups whose answers differ in reward."""
    return float(np.count_nonzero(teaching_G)) / teaching_G.size if teaching_G.size else 0.0
