# SPDX-License-Identifier: Apache-2.0
"""Step time, bubbles and the best split of GPUs, predicted from the rates of a run: pure functions.

How long a step takes is the model of `idle_forecast`; owns what a balance report says of a run's
rates, and what they give for another split. Measures nothing."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.report.shape import BalanceReport, PolicyReport
from penstock.fleet.idle_forecast import Load, Pipeline, Tagging, dedicated_step_s


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRates:
    """One policy of a run, over its last window."""

    policy: str
    step_s: float
    """As it was, waits included."""
    train_s: float
    """A step without the wait for its batch."""
    rollout_gpu_s: float
    """GPU seconds of rollout behind one step."""
    gpus: int
    """Of the rollout pool."""
    tokens_per_gpu_s: float
    """Sampled by a busy GPU."""
    pool_share: float = 1.0
    """Of the pool's tokens that were for this policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    policy: str
    rollout_gpus: int
    rollout_s: float
    """To roll out the data of one step."""
    train_s: float
    step_s: float
    trainer_idle: float
    """Share of a step in which the trainer waits for data."""
    nodes_idle: float
    """Share of a step in which nodes wait."""
    rollout_per_train: float
    """Rollout GPUs per training GPU at which neither waits."""


def measured_rates(report: BalanceReport) -> list[MeasuredRates]:
    """Of each policy that was measured; none before the first window has closed."""
    found = [_rates(report, policy) for policy in report.policies]
    return [rates for rates in found if rates is not None]


def _rates(report: BalanceReport, policy: PolicyReport) -> MeasuredRates | None:
    window, pool = policy.window, report.pool
    step_s, wait_s = window.avg_step_time_s, window.avg_batch_wait_s
    tokens = window.production.produced.tokens
    busy_gpu_s = report.window.wall_s * pool.total_gpus * (pool.busy_share or 0.0)
    all_tokens = sum(one.window.production.produced.tokens for one in report.policies)
    if not step_s or wait_s is None or not tokens or not window.num_versions or not busy_gpu_s:
        return None
    rate = all_tokens / busy_gpu_s
    return MeasuredRates(
        policy=policy.policy,
        step_s=step_s,
        train_s=max(0.0, step_s - wait_s),
        rollout_gpu_s=tokens / window.num_versions / rate,
        gpus=pool.total_gpus,
        tokens_per_gpu_s=rate,
        pool_share=tokens / all_tokens,
    )


def predict(
    rates: MeasuredRates,
    *,
    rollout_gpus: int,
    train_gpus: int,
    work_ratio: float = 1.0,
    overlaps: bool = True,
) -> Prediction:
    """`work_ratio`: rows of a step, compared with the measured one. `overlaps`: the next batch is
    rolled out while this one is trained."""
    rollout_gpu_s = rates.rollout_gpu_s * work_ratio
    rollout_s = rollout_gpu_s / (max(1, rollout_gpus) * rates.pool_share)
    train_s = rates.train_s * work_ratio
    step_s = dedicated_step_s(
        Pipeline.OFF_POLICY if overlaps else Pipeline.NAIVE,
        Load(rollout_s=rollout_s, train_s=train_s),
        Tagging(rollout=1, train=1),  # both sides as a whole
    )
    return Prediction(
        policy=rates.policy,
        rollout_gpus=rollout_gpus,
        rollout_s=rollout_s,
        train_s=train_s,
        step_s=step_s,
        trainer_idle=1.0 - train_s / step_s,
        nodes_idle=1.0 - rollout_s / step_s,
        rollout_per_train=rollout_gpu_s / (train_s * train_gpus) if train_s else 0.0,
    )
