# SPDX-License-Identifier: Apache-2.0
"""Signals of a batch and the alarm, each against numbers worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.trainer.learner import SkipReason, Stats
from penstock.trainer.signals.alarms import (
    ALARM_AFTER,
    EXCLUDED,
    MAX_K3_PER_VERSION,
    Cause,
    DivergenceStreak,
    NoSignalStreak,
    cause_of,
)
from penstock.trainer.signals.mismatch import Mismatch
from penstock.trainer.signals.ratio_stats import (
    RatioStats,
    informative_share,
    log_ratios,
    measure_ratios,
    tokens_with_advantage,
)

CLIP = {"low": 0.2, "high": 0.2}


def ratios_of(weights: list[float], advantages: list[float] | None = None) -> RatioStats:
    log_K = np.log(np.array(weights))
    advantages_K = np.array(advantages or [1.0] * len(weights))
    return measure_ratios(log_K - 3.0, np.full(log_K.shape, -3.0), advantages_K, **CLIP)


# --- ratios -----------------------------------------------------------------------------------


def test_effective_samples_of_equal_weights_are_all_of_them() -> None:
    assert ratios_of([1.0] * 7).effective_samples == pytest.approx(7.0)
    assert ratios_of([0.3] * 7).effective_samples == pytest.approx(7.0), "scale says nothing"


def test_one_dominating_weight_is_one_sample() -> None:
    assert ratios_of([1e8, *[1e-3] * 99]).effective_samples == pytest.approx(1.0, abs=1e-6)


def test_effective_samples_against_the_formula() -> None:
    weights = np.random.default_rng(0).lognormal(0.0, 0.7, 500)
    expected = weights.sum() ** 2 / (weights**2).sum()
    assert ratios_of(weights.tolist()).effective_samples == pytest.approx(expected)


def test_clipping_is_told_by_the_sign_of_the_advantage() -> None:
    """Above the bound a token with a bad advantage still has its gradient, and the other way."""
    up, down = [1.5, 0.5, 0.5, 1.0], [1.5, 1.4, 0.5]
    found = ratios_of([*up, *down, 1.1], [*[2.0] * 4, *[-1.0] * 3, 0.0])
    metrics = found.metrics()
    assert metrics["signal/clipped_up"] == pytest.approx(1 / 4)
    assert metrics["signal/clipped_down"] == pytest.approx(1 / 3)
    assert metrics["signal/clipped"] == pytest.approx(2 / 7)
    assert metrics["ratio/beyond"] == pytest.approx(6 / 8)


def test_quantiles_of_the_log_ratio_are_those_of_numpy_to_a_bin() -> None:
    log_K = np.random.default_rng(1).normal(0.05, 0.3, 20_000)
    found = measure_ratios(log_K, np.zeros_like(log_K), np.ones_like(log_K), **CLIP)
    for name, share in {"q01": 0.01, "q50": 0.5, "q999": 0.999}.items():
        expected = float(np.quantile(log_K, share))
        assert found.metrics()[f"ratio/log_{name}"] == pytest.approx(expected, abs=0.006)


def test_two_ranks_add_up_to_one() -> None:
    rng = np.random.default_rng(2)
    now_K, then_K, advantages_K = rng.normal(-2, 0.4, (3, 1000))
    whole = measure_ratios(now_K, then_K, advantages_K, **CLIP)
    parts = [
        measure_ratios(now_K[part], then_K[part], advantages_K[part], **CLIP)
        for part in (slice(0, 300), slice(300, None))
    ]
    added = RatioStats.from_vector(parts[0].vector + parts[1].vector)
    assert added.metrics() == pytest.approx(whole.metrics())


def test_an_absurd_record_and_an_empty_batch_give_numbers() -> None:
    odd_K = np.array([-1.0, -1e38, math.nan, math.inf, -math.inf])
    assert np.abs(log_ratios(odd_K, np.full(5, -1.0))).max() == 20.0
    metrics = measure_ratios(odd_K, np.full(5, -1.0), np.ones(5), **CLIP).metrics()
    assert all(math.isfinite(value) for value in metrics.values())
    none = np.zeros(0)
    assert set(measure_ratios(none, none, none, **CLIP).metrics().values()) == {0.0}


def test_a_group_informs_when_one_of_its_tokens_has_an_advantage() -> None:
    groups_K = np.array([0, 0, 1, 1, 3])
    teaching_G = tokens_with_advantage(np.array([0.0, -1.0, 0.0, 0.0, 2.0]), groups_K, 4)
    assert teaching_G.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert informative_share(teaching_G) == 0.5
    assert informative_share(np.zeros(0)) == 0.0


# --- alarms -----------------------------------------------------------------------------------

GOOD = {"tokens/trained": 100.0, "signal/informative_groups": 0.5, "signal/clipped": 0.1}
CLIPPED = {"signal/clipped": 1.0}


def stats_with(
    change: dict[str, float], *, skipped: SkipReason | None = None, gap: float = 0.01
) -> Stats:
    mismatches = {
        ("a", 1): Mismatch(100, 60 * gap, 0.0, gap),
        ("b", 1): Mismatch(100, 140 * gap, 0, gap),
        ("b", 2): Mismatch(100, 1e6, 0, 1e4),
    }
    return Stats(skipped=skipped, values=GOOD | change, mismatches=mismatches)


@pytest.mark.parametrize(
    ("stats", "cause"),
    [
        (stats_with({}), None),
        (
            stats_with(
                {"tokens/trained": 0.0, "signal/informative_groups": 0.0},
                skipped=SkipReason.NO_TOKENS,
            ),
            Cause.NO_TOKENS,
        ),
        (stats_with({"tokens/trained": 0.0, EXCLUDED: 8.0}), Cause.EXCLUDED),
        (stats_with({EXCLUDED: 2.0}), None),
        (stats_with({"signal/informative_groups": 0.0}), Cause.EQUAL_REWARDS),
        (stats_with(CLIPPED, gap=3.0), Cause.GAP),
        (stats_with({}, gap=math.nan), Cause.GAP),
        (stats_with(CLIPPED), Cause.ALL_CLIPPED),
        (stats_with({}, skipped=SkipReason.NON_FINITE), Cause.SKIPPED),
        (stats_with(CLIPPED, skipped=SkipReason.REJECTED), Cause.REJECTED),
    ],
)
def test_each_cause(stats: Stats, cause: Cause | None) -> None:
    assert cause_of(stats) is cause


@pytest.mark.parametrize(
    ("cause", "word"),
    [
        (Cause.NO_TOKENS, "penstock explain"),
        (Cause.EXCLUDED, "sampling.max_tokens"),
        (Cause.EQUAL_REWARDS, "reward function"),
        (Cause.EQUAL_REWARDS, "{admit: reward-spread}"),
        (Cause.GAP, "different weights"),
        (Cause.ALL_CLIPPED, "max_staleness"),
        (Cause.SKIPPED, "learning_rate"),
        (Cause.REJECTED, "the engine's log-probs"),
    ],
)
def test_the_alarm_names_the_cause_and_the_next_step(cause: Cause, word: str) -> None:
    no_signal = NoSignalStreak()
    for _ in range(ALARM_AFTER):
        assert no_signal.alarm is None
        no_signal = no_signal.updated(cause)
    assert no_signal.alarm is not None
    assert f"{ALARM_AFTER} {cause.value}" in no_signal.alarm and word in no_signal.alarm


def test_the_alarm_comes_again_ever_more_rarely_and_ends_with_a_good_batch() -> None:
    no_signal, reported = NoSignalStreak(), list[int]()
    for number in range(1, 26):
        no_signal = no_signal.updated(Cause.GAP if number % 5 == 0 else Cause.EQUAL_REWARDS)
        if no_signal.alarm:
            reported.append(number)
            assert "equal_rewards" in no_signal.alarm
    assert reported == [3, 6, 12, 24]
    assert no_signal.updated(None) == NoSignalStreak() and NoSignalStreak().alarm is None


def test_engines_far_from_the_trainer_are_told_after_three_batches() -> None:
    divergence = DivergenceStreak()
    for _ in range(ALARM_AFTER):
        assert divergence.alarm is None
        divergence = divergence.updated(2.2 * MAX_K3_PER_VERSION, 2.0)
    assert divergence.alarm is not None
    assert "0.11 per version" in divergence.alarm and "training.precision" in divergence.alarm
    assert divergence.updated(math.nan, 1.0).num_batches == ALARM_AFTER + 1, "no number is far away"
    assert (
        divergence.updated(1.9 * MAX_K3_PER_VERSION, 2.0)
        == divergence.updated(0.9 * MAX_K3_PER_VERSION, 0.0)
        == DivergenceStreak()
    )
