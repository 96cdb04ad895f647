# SPDX-License-Identifier: Apache-2.0
"""Which credential's rows differ from the trainer, at every age of the tokens."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.trainer.signals.alarms import Cause, NoSignalStreak
from penstock.trainer.signals.mismatch import (
    FORGET_AFTER,
    NO_GAP,
    Key,
    Mismatch,
    NodeMismatches,
    ScoredTokens,
    from_vector,
    measure_mismatches,
    pool_mismatch,
    to_vector,
)
from penstock.types import NodeId, subject_of_node
from penstock.wire.codec import JSON, decode, encode_json


def gap(k3: float, num_tokens: int = 1000, surprise: float = 0.0) -> Mismatch:
    size = math.sqrt(2 * k3)
    return Mismatch(
        num_tokens=num_tokens,
        sum_abs=size * num_tokens,
        sum_k3=k3 * num_tokens,
        max_abs=size,
        sum_surprise=surprise * num_tokens,
        sum_surprise2=(surprise**2 + 1) * num_tokens,
    )


def at(age: int, **found: Mismatch) -> dict[Key, Mismatch]:
    return {(subject, age): one for subject, one in found.items()}


def drawn(rng: np.random.Generator, num_tokens: int, spread: float) -> Mismatch:
    zeros = np.zeros(num_tokens, np.int64)
    tokens = ScoredTokens(
        logprobs_K=rng.normal(0.0, spread, num_tokens),
        sampling_K=np.zeros(num_tokens),
        entropy_K=np.zeros(num_tokens),
        staleness_K=zeros,
        rows_K=zeros,
    )
    return measure_mismatches(tokens, {0: "n"})["n", 0]


def names(mismatches: NodeMismatches) -> list[str]:
    return [one.subject for one in mismatches.drifting()]


def test_a_gap_is_counted_by_subject_and_age() -> None:
    log_K = np.array([0.1, -0.2, 0.4, 5.0, 0.3])
    tokens = ScoredTokens(
        logprobs_K=log_K - 1.0,
        sampling_K=np.full(5, -1.0),
        entropy_K=np.full(5, 0.5),
        staleness_K=np.array([0, 0, 0, 1, 0]),
        rows_K=np.array([0, 0, 1, 1, 2]),
    )
    found = measure_mismatches(tokens, {0: "a", 1: "b", 2: "a"})
    assert {key: one.num_tokens for key, one in found.items()} == {
        ("a", 0): 3,
        ("b", 0): 1,
        ("b", 1): 1,
    }
    assert found["a", 0].mean_abs == pytest.approx((0.1 + 0.2 + 0.3) / 3)
    k3 = [math.exp(x) - 1 - x for x in (0.1, -0.2, 0.3)]
    assert found["a", 0].k3 == pytest.approx(sum(k3) / 3)
    assert found["b", 0].max_abs == pytest.approx(0.4) and found["b", 1].max_abs == 5.0
    surprises = [1.0 - x - 0.5 for x in (0.1, -0.2, 0.3)]
    assert found["a", 0].sum_surprise == pytest.approx(sum(surprises))
    assert found["a", 0].sum_surprise2 == pytest.approx(sum(x * x for x in surprises))
    assert pool_mismatch(found).num_tokens == 4, "the freshest alone: it is the engines' gap"
    nothing = np.zeros(0)
    empty = ScoredTokens(
        logprobs_K=nothing,
        sampling_K=nothing,
        entropy_K=nothing,
        staleness_K=np.zeros(0, np.int64),
        rows_K=np.zeros(0, np.int64),
    )
    assert measure_mismatches(empty, {}) == {} and pool_mismatch({}) == NO_GAP


def test_gaps_travel_between_ranks_as_numbers() -> None:
    one = {("node-1", 0): gap(0.5, 10), ("node-1", 3): gap(0.7, 10), ("knöten", 0): gap(0.1, 3)}
    other = {("node-1", 0): gap(0.25, 30)}
    joined = from_vector(np.concatenate([to_vector(one), to_vector(other)]))
    assert joined == one | {("node-1", 0): one["node-1", 0] + other["node-1", 0]}
    assert from_vector(to_vector({})) == {}


def test_a_planted_drifting_node_among_five_is_found_and_only_it() -> None:
    rng, mismatches = np.random.default_rng(3), NodeMismatches()
    for seq in range(1, 11):
        spreads = {f"node-{n}": 0.3 if n == 3 and seq > 4 else 0.03 for n in range(5)}
        observed = {(n, 0): drawn(rng, 2000, spread) for n, spread in spreads.items()}
        mismatches = mismatches.updated(observed, seq)
        if seq <= 4:
            assert mismatches.drifting() == ()
    [found] = mismatches.drifting()
    assert found.node_id == "node-3"
    assert "node-3" in str(found) and "new token" in str(found)


@pytest.mark.parametrize("claimed", [0, 1, 3])
@pytest.mark.parametrize("others_too", [True, False])
def test_a_claim_to_be_late_hides_nothing(claimed: int, others_too: bool) -> None:
    """Whether or not others have tokens of that age, and whatever age it claims."""
    mismatches = NodeMismatches()
    for seq in range(1, 4):
        observed = at(0, a=gap(1e-4), b=gap(1e-4), c=gap(1e-4))
        if others_too:
            observed |= at(claimed, a=gap(0.01), b=gap(0.01), c=gap(0.01))
        observed |= at(claimed, evil=gap(0.72))  # log-probs off by 1.5
        mismatches = mismatches.updated(observed, seq)
    assert names(mismatches) == ["evil"]


def test_claims_of_many_ages_are_judged_together() -> None:
    """Too few tokens of each age to be judged by, but enough in all."""
    observed = at(0, a=gap(1e-4), b=gap(1e-4), c=gap(1e-4))
    for age in range(8):
        observed |= at(age, evil=gap(2.0, 100))
    assert names(NodeMismatches().updated(observed, 1)) == ["evil"]


def test_the_policy_may_move_between_versions() -> None:
    """A slow node alone with old tokens is honest, and so is a pool whose policy moves fast."""
    fresh = at(0, a=gap(1e-4), b=gap(1e-4), c=gap(1e-4))
    assert names(NodeMismatches().updated(fresh | at(2, slow=gap(0.1)), 1)) == []
    late = at(1, a=gap(0.01), b=gap(0.01), c=gap(0.01))
    assert names(NodeMismatches().updated(late | at(0, quick=gap(0.005)), 1)) == []
    fast = at(1, a=gap(0.3), b=gap(0.4), c=gap(0.35), d=gap(0.5))
    assert names(NodeMismatches().updated(fresh | fast, 1)) == []


def test_tokens_that_another_distribution_drew_are_told_by_their_surprise() -> None:
    """Their log-probs are right: they were computed afterwards."""
    usual = {"a": gap(1e-4), "b": gap(1e-4, surprise=0.02), "c": gap(1e-4, surprise=-0.02)}
    for surprise, how in ((0.6, "less likely"), (-0.6, "more likely")):
        found = NodeMismatches().updated(at(0, **usual, d=gap(1e-4, surprise=surprise)), 1)
        assert names(found) == ["d"] and how in str(found.drifting()[0])
    shifted = {name: gap(1e-2, surprise=0.6) for name in "abcd"}
    assert names(NodeMismatches().updated(at(2, **shifted), 1)) == [], "all of that age"


def test_a_busy_pool_of_equal_nodes_has_no_drift() -> None:
    rng, mismatches = np.random.default_rng(4), NodeMismatches()
    for seq in range(1, 101):
        sizes = rng.integers(20, 4000, 16)
        observed = {(f"n{i}", 0): drawn(rng, int(n), 0.05) for i, n in enumerate(sizes)}
        mismatches = mismatches.updated(observed, seq)
        assert mismatches.drifting() == ()


def test_rounding_in_a_pool_that_agrees_to_the_bit_is_no_drift() -> None:
    observed = at(0, a=gap(0.0), b=gap(0.0), c=gap(5e-4))
    assert NodeMismatches().updated(observed, 1).drifting() == ()
    assert names(NodeMismatches().updated(observed | at(0, c=gap(5e-3)), 1)) == ["c"]


def test_nobody_is_judged_by_few_tokens_or_in_a_pool_of_two() -> None:
    pool = at(0, a=gap(1e-3), b=gap(1e-3))
    assert NodeMismatches().updated(pool | at(0, c=gap(9.0, 50)), 1).drifting() == ()
    assert NodeMismatches().updated(at(0, a=gap(1e-3), c=gap(9.0)), 1).drifting() == ()
    assert names(NodeMismatches().updated(pool | at(0, c=gap(9.0)), 1)) == ["c"]


def test_log_probs_that_are_no_numbers_differ() -> None:
    pool = at(0, a=gap(1e-3), b=gap(1e-3), c=gap(1e-3))
    assert names(NodeMismatches().updated(pool | at(0, d=gap(math.nan)), 1)) == ["d"]


def test_who_was_reported_is_not_reported_again_and_a_lost_one_is_forgotten() -> None:
    pool = at(0, a=gap(1e-3), b=gap(1e-3), d=gap(1e-3))
    mismatches = NodeMismatches().updated(pool | at(0, c=gap(9.0)), 1)
    mismatches = mismatches.without_reported(mismatches.drifting())
    again = mismatches.updated(pool | at(0, c=gap(9.0)), 2)
    assert again.drifting() == () and "c" not in again.nodes
    later = again.updated(at(0, a=gap(1e-3)), 3 + FORGET_AFTER)
    assert set(later.nodes) == {"a"}


def test_names_and_restarts_of_one_credential_are_one() -> None:
    assert {subject_of_node(NodeId(name)) for name in ("a", "a.1", "a.1.x")} == {"a"}


def test_an_average_forgets_by_tokens_not_by_batches() -> None:
    whole = NodeMismatches().updated(at(0, a=gap(0.5, 4096)), 1).nodes["a"][0]
    later = (
        NodeMismatches()
        .updated(at(0, a=gap(0.5, 40_960)), 1)
        .updated(at(0, a=gap(0.0, 4096)), 2)
        .nodes["a"][0]
    )
    assert whole.k3 == pytest.approx(0.5)
    assert later.num_tokens == pytest.approx(20_480 + 4096)
    assert later.k3 == pytest.approx(0.5 * 20_480 / 24_576)


def test_what_is_remembered_survives_in_json() -> None:
    mismatches = NodeMismatches().updated(
        at(0, a=gap(1e-3), b=gap(2e-3, 77)) | at(2, a=gap(0.1)), 5
    )
    assert decode(encode_json(mismatches), NodeMismatches, media_type=JSON) == mismatches
    no_signal = NoSignalStreak().updated(Cause.GAP).updated(Cause.ALL_CLIPPED)
    assert decode(encode_json(no_signal), NoSignalStreak, media_type=JSON) == no_signal
