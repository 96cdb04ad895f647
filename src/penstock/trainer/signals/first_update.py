# SPDX-License-Identifier: Apache-2.0
"""Measures the first update of a batch, before the weights move: its signal, and the mismatch
between trainer and engines by node and staleness. Over all ranks. Judges nothing: the monitor does.

T = tokens of all samples, K = tokens of the first update.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.trainer.arrays import Floats
from penstock.trainer.batches import Batch
from penstock.trainer.ranks.group import RankReductions
from penstock.trainer.signals.mismatch import (
    Key,
    Mismatch,
    ScoredTokens,
    from_vector,
    measure_mismatches,
    pool_mismatch,
    to_vector,
)
from penstock.trainer.signals.process_scores import score_metrics
from penstock.trainer.signals.ratio_stats import (
    RatioStats,
    informative_share,
    measure_ratios,
    tokens_with_advantage,
)


def first_update_stats(
    batch: Batch,
    logprobs_T: Floats,
    entropy_T: Floats,
    bounds: tuple[float, float],
    ranks: RankReductions,
) -> tuple[dict[str, float], dict[Key, Mismatch]]:
    """(metrics, mismatch by subject and staleness). `logprobs_T`: log-probs of the first update's
    tokens, NaN elsewhere; `entropy_T`: entropies of the distributions they are from."""
    samples, rows_T = batch.samples, batch.rows_T
    advantages_T = np.where(samples.mask_T, batch.token_columns["advantage"], 0.0)
    teaching_G = tokens_with_advantage(advantages_T, batch.groups_R[rows_T], batch.num_groups)
    metrics = {"signal/informative_groups": informative_share(ranks.sum_over_ranks(teaching_G))}
    token_K = np.flatnonzero(~np.isnan(logprobs_T))
    sampling_K = samples.logprobs_T[token_K].astype(np.float64)
    low, high = bounds
    ratios = measure_ratios(
        logprobs_T[token_K], sampling_K, advantages_T[token_K], low=low, high=high
    )
    metrics |= RatioStats.from_vector(ranks.sum_over_ranks(ratios.vector)).metrics()
    tokens = ScoredTokens(
        logprobs_K=logprobs_T[token_K],
        sampling_K=sampling_K,
        entropy_K=entropy_T[token_K],
        staleness_K=batch.trains_from - samples.versions_T[token_K].astype(np.int64),
        rows_K=rows_T[token_K],
    )
    own = measure_mismatches(tokens, batch.subjects)
    mismatches = from_vector(ranks.gather_over_ranks(torch.from_numpy(to_vector(own))).numpy())
    pool = pool_mismatch(mismatches)
    metrics |= {"gap/mean": pool.mean_abs, "gap/k3": pool.k3, "gap/max": pool.max_abs}
    freshest = min((staleness for _, staleness in mismatches), default=0)
    metrics["gap/staleness"] = float(freshest)
    return metrics | score_metrics(batch, ranks), mismatches
