# SPDX-License-Identifier: Apache-2.0
"""Predicted steps: exact where the measured run is, and monotone elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.prediction import MeasuredRates, predict

seconds = st.floats(min_value=0.01, max_value=1e4)


def rates(*, train_s: float, rollout_gpu_s: float, gpus: int = 4) -> MeasuredRates:
    step_s = max(train_s, rollout_gpu_s / gpus)
    return MeasuredRates(
        policy="policy",
        step_s=step_s,
        train_s=train_s,
        rollout_gpu_s=rollout_gpu_s,
        gpus=gpus,
        tokens_per_gpu_s=100.0,
    )


@given(train_s=seconds, rollout_gpu_s=seconds, gpus=st.integers(1, 1000))
def test_the_measured_run_is_predicted_as_it_was(
    train_s: float, rollout_gpu_s: float, gpus: int
) -> None:
    measured = rates(train_s=train_s, rollout_gpu_s=rollout_gpu_s, gpus=gpus)
    step = predict(measured, rollout_gpus=gpus, train_gpus=1)
    assert step.step_s == pytest.approx(measured.step_s)
    assert min(step.trainer_idle, step.nodes_idle) == pytest.approx(0.0, abs=1e-9)


@given(train_s=seconds, rollout_gpu_s=seconds, gpus=st.integers(1, 100))
def test_at_the_split_neither_waits(train_s: float, rollout_gpu_s: float, gpus: int) -> None:
    measured = rates(train_s=train_s, rollout_gpu_s=rollout_gpu_s, gpus=gpus)
    per_train = predict(measured, rollout_gpus=gpus, train_gpus=1).rollout_per_train
    more = predict(measured, rollout_gpus=int(per_train) + 1, train_gpus=1)
    assert more.step_s == pytest.approx(train_s) and more.trainer_idle == pytest.approx(0, abs=1e-9)
    if int(per_train) >= 1:
        fewer = predict(measured, rollout_gpus=int(per_train), train_gpus=1)
        assert fewer.step_s >= train_s * (1 - 1e-9)


def test_without_overlap_both_sides_add_up() -> None:
    measured = rates(train_s=2.0, rollout_gpu_s=12.0, gpus=4)
    step = predict(measured, rollout_gpus=4, train_gpus=1, overlaps=False)
    assert (step.rollout_s, step.step_s, step.trainer_idle) == (3.0, 5.0, pytest.approx(0.6))
    double = predict(measured, rollout_gpus=4, train_gpus=1, work_ratio=2.0)
    assert (double.rollout_s, double.train_s, double.step_s) == (6.0, 4.0, 6.0)
