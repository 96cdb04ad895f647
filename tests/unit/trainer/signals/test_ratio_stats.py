# SPDX-License-Identifier: Apache-2.0
"""Signals of a batch, gaps of nodes and the alarm, each against numbers worked out by hand."""

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
from penstock.trainer.signals.mismatch import (
    FORGET_AFTER,
    NO_GAP,
    Floats,
    Mismatch,
    NodeMismatches,
    from_vector,
    mismatch_by_node,
    pool_mismatch,
    to_vector,
)
from penstock.trainer.signals.ratio_stats import (
    RatioStats,
    informative_share,
    log_ratios,
    measure_ratios,
    tokens_with_advantage,
)
from penstock.wire.codec import JSON, decode, encode_json

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


# --- gaps -------------------------------------------------------------------------------------


def test_a_gap_counts_fresh_tokens_of_its_node_alone() -> None:
    log_K = np.array([0.1, -0.2, 0.4, 5.0, 0.3])
    found = mismatch_by_node(
        log_K - 1.0,
        np.full(5, -1.0),
        np.array([0, 0, 0, 1, 0]),
        np.array([0, 0, 1, 1, 2]),
        {0: "a", 1: "b", 2: "a"},
        staleness=0,
    )
    assert found["a"].num_tokens == 3 and found["b"].num_tokens == 1
    assert found["a"].mean_abs == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    k3 = [math.exp(x) - 1 - x for x in (0.1, -0.2, 0.3)]
    assert found["a"].k3 == pytest.approx(sum(k3) / 3)
    assert found["b"].max_abs == pytest.approx(0.4), "the stale token is no disagreement"
    assert pool_mismatch(found).num_tokens == 4


def test_gaps_travel_between_ranks_as_numbers() -> None:
    one = {"node-1": gap(0.5, 10), "knöten": gap(0.1, 3)}
    other = {"node-1": gap(0.25, 30)}
    joined = from_vector(np.concatenate([to_vector(one), to_vector(other)]))
    assert joined == {"node-1": one["node-1"] + other["node-1"], "knöten": one["knöten"]}
    assert from_vector(to_vector({})) == {}


def gap(k3: float, num_tokens: int = 1000) -> Mismatch:
    size = math.sqrt(2 * k3)
    return Mismatch(
        num_tokens=num_tokens, sum_abs=size * num_tokens, sum_k3=k3 * num_tokens, max_abs=size
    )


def drawn(rng: np.random.Generator, num_tokens: int, spread: float) -> Mismatch:
    log_K: Floats = rng.normal(0.0, spread, num_tokens)
    zeros = np.zeros(num_tokens, np.int64)
    return mismatch_by_node(log_K, np.zeros(num_tokens), zeros, zeros, {0: "n"}, staleness=0)["n"]


def test_a_planted_drifting_node_among_five_is_found_and_only_it() -> None:
    rng, mismatches = np.random.default_rng(3), NodeMismatches()
    for seq in range(1, 11):
        spreads = {f"node-{n}": 0.3 if n == 3 and seq > 4 else 0.03 for n in range(5)}
        mismatches = mismatches.updated({n: drawn(rng, 2000, s) for n, s in spreads.items()}, seq)
        if seq <= 4:
            assert mismatches.drifting() == ()
    [found] = mismatches.drifting()
    assert found.node_id == "node-3"
    assert "node-3" in str(found) and "restart it" in str(found)


def test_a_busy_pool_of_equal_nodes_has_no_drift() -> None:
    rng, mismatches = np.random.default_rng(4), NodeMismatches()
    for seq in range(1, 101):
        sizes = rng.integers(20, 4000, 16)
        mismatches = mismatches.updated(
            {f"n{i}": drawn(rng, int(n), 0.05) for i, n in enumerate(sizes)}, seq
        )
        assert mismatches.drifting() == ()


def test_rounding_in_a_pool_that_agrees_to_the_bit_is_no_drift() -> None:
    observed = {"a": gap(0.0), "b": gap(0.0), "c": gap(5e-4)}
    assert NodeMismatches().updated(observed, 1).drifting() == ()
    assert len(NodeMismatches().updated(observed | {"c": gap(5e-3)}, 1).drifting()) == 1


def test_nobody_is_judged_by_few_tokens_or_in_a_pool_of_two() -> None:
    pool = {"a": gap(1e-3), "b": gap(1e-3)}
    assert NodeMismatches().updated(pool | {"c": gap(9.0, 50)}, 1).drifting() == ()
    assert NodeMismatches().updated({"a": gap(1e-3), "c": gap(9.0)}, 1).drifting() == ()
    assert len(NodeMismatches().updated(pool | {"c": gap(9.0)}, 1).drifting()) == 1


def test_a_node_that_comes_back_is_judged_anew_and_a_lost_one_is_forgotten() -> None:
    mismatches = NodeMismatches().updated({"a": gap(1e-3), "b": gap(1e-3), "c": gap(9.0)}, 1)
    without_reported = mismatches.without_reported(mismatches.drifting())
    assert without_reported.drifting() == ()
    again = without_reported.updated({"a": gap(1e-3), "b": gap(1e-3), "c": gap(1e-3)}, 2)
    assert again.drifting() == ()
    assert "c" in again.nodes
    later = again.updated({"a": gap(1e-3)}, 3 + FORGET_AFTER)
    assert set(later.nodes) == {"a"}


def test_rows_of_a_life_that_was_told_say_nothing_of_the_next() -> None:
    pool = {"a/1": gap(1e-3), "b/1": gap(1e-3)}
    mismatches = NodeMismatches().updated(pool | {"c/old": gap(9.0)}, 1)
    [found] = mismatches.drifting()
    assert (found.node_id, found.boot_id) == ("c", "old")
    mismatches = mismatches.without_reported([found]).updated(
        pool | {"c/old": gap(9.0), "c/new": gap(1e-3)}, 2
    )
    assert mismatches.drifting() == ()
    [found] = mismatches.updated(pool | {"c/new": gap(90.0)}, 3).drifting()
    assert (found.node_id, found.boot_id) == ("c", "new")


def test_several_lives_of_two_nodes_make_no_pool() -> None:
    lives = {"a/1": gap(1e-3), "a/2": gap(1e-3), "b/1": gap(9.0)}
    assert NodeMismatches().updated(lives, 1).drifting() == ()


def test_a_node_that_restarts_at_each_batch_does_not_outvote_the_others() -> None:
    mismatches = NodeMismatches()
    for seq in range(1, 9):
        observed = {f"a/{seq}": gap(1e-4), "b/1": gap(2e-3), "c/1": gap(2e-3)}
        mismatches = mismatches.updated(observed, seq)
        assert mismatches.drifting() == ()


def test_the_lives_of_a_bad_node_do_not_hide_it() -> None:
    mismatches = NodeMismatches()
    for seq in range(1, 7):
        mismatches = mismatches.updated({f"bad/{seq}": gap(0.05), "b/1": gap(2e-4)}, seq)
    mismatches = mismatches.updated({"b/1": gap(2e-4), "c/1": gap(2e-4)}, 7)
    found = mismatches.drifting()
    assert {one.boot for one in found} == {f"bad/{seq}" for seq in range(1, 7)}
    assert found[0].median_k3 == pytest.approx(2e-4)


def test_an_average_forgets_by_tokens_not_by_batches() -> None:
    whole = NodeMismatches().updated({"a": gap(0.5, 4096)}, 1).nodes["a"]
    halves = (
        NodeMismatches()
        .updated({"a": gap(0.5, 2048)}, 1)
        .updated({"a": gap(0.5, 2048)}, 2)
        .nodes["a"]
    )
    assert whole.weight == pytest.approx(0.5)
    assert (whole.k3, whole.weight) == pytest.approx((halves.k3, halves.weight))
    later = NodeMismatches().updated({"a": gap(0.5, 40_960)}, 1).updated({"a": gap(0.0, 4096)}, 2)
    assert later.nodes["a"].k3 == pytest.approx(0.25, rel=0.01)
    assert NO_GAP.k3 == 0.0


def test_what_is_remembered_survives_in_json() -> None:
    mismatches = NodeMismatches().updated({"a": gap(1e-3), "b": gap(2e-3, 77)}, 5)
    assert decode(encode_json(mismatches), NodeMismatches, media_type=JSON) == mismatches
    no_signal = NoSignalStreak().updated(Cause.GAP).updated(Cause.ALL_CLIPPED)
    assert decode(encode_json(no_signal), NoSignalStreak, media_type=JSON) == no_signal


# --- alarms -----------------------------------------------------------------------------------

GOOD = {"tokens/trained": 100.0, "signal/informative_groups": 0.5, "signal/clipped": 0.1}
CLIPPED = {"signal/clipped": 1.0}


def stats_with(
    change: dict[str, float], *, skipped: SkipReason | None = None, gap: float = 0.01
) -> Stats:
    mismatches = {"n/1": Mismatch(100, 60 * gap, 0.0, gap), "n/2": Mismatch(100, 140 * gap, 0, gap)}
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
