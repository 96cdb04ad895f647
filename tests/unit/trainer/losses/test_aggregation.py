# SPDX-License-Identifier: Apache-2.0
"""The denominator rule, and that no cut of an update into parts changes its loss or gradient."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from tests.unit.trainer import oracles
from tests.unit.trainer.cases import Case, Floats, losses_and_gradient, random_case

from penstock.trainer.algorithms.gspo import GspoLoss
from penstock.trainer.losses.aggregation import Aggregation, Counts, LossWeights, count
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.mismatch import CorrectedLoss, Correction, Weighting
from penstock.trainer.losses.ratios import RatioAgainst
from penstock.trainer.losses.tokens import Objective


def rule(mode: Aggregation) -> LossWeights:
    return LossWeights(aggregation=mode, constant_length=16)


def add(counts: list[Counts]) -> Counts:
    """Of a whole update, as ranks add them up."""
    return Counts(*np.sum([astuple(one) for one in counts], axis=0).tolist())


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)


@pytest.mark.parametrize(
    ("mode", "flat", "peaked"),
    [
        (LossWeights(), 1.0, 1.0),
        (LossWeights(aggregation=Aggregation.SEQ_MEAN_TOKEN_MEAN), 1.0, 2.0),
        (LossWeights(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM), 2.0, 2.0),
        (LossWeights(aggregation=Aggregation.FIXED_CONSTANT, constant_length=4), 0.5, 0.5),
    ],
)
def test_two_sequences_by_hand(mode: LossWeights, flat: float, peaked: float) -> None:
    lengths = ints(1, 3)
    weights = mode.by_token(lengths, count(lengths, None), None)
    assert weights @ np.ones(4) == pytest.approx(flat)
    assert weights @ np.array([4.0, 0, 0, 0]) == pytest.approx(peaked)


@pytest.mark.parametrize("mode", Aggregation)
@pytest.mark.parametrize("share", [1.0, 0.8, 0.3, 0.05])
def test_rejected_tokens_against_the_oracle(mode: Aggregation, share: float) -> None:
    draw = np.random.default_rng(0)
    lengths = ints(3, 0, 1, 12, 7, 0)
    losses, kept = draw.standard_normal(23), draw.random(23) < share
    weights = rule(mode).by_token(lengths, count(lengths, kept), kept)
    want = oracles.aggregate(
        losses,
        lengths.tolist(),
        mode,
        kept=kept.tolist(),
        is_surviving=True,
        constant=16,
    )
    assert weights @ losses == pytest.approx(want, rel=1e-12)
    assert (weights[~kept] == 0).all()


def test_few_survivors_are_not_blown_up() -> None:
    lengths, kept = ints(10), np.arange(10) < 2
    weights = LossWeights().by_token(lengths, count(lengths, kept), kept)
    assert weights.tolist() == [1 / 5] * 2 + [0.0] * 8


def test_sequences_without_tokens_do_not_count() -> None:
    lengths = ints(2, 0, 2)
    assert count(lengths, None).num_sequences == 2
    assert count(ints(0, 0), None).is_empty
    kept = np.array([True, True, False, False])
    assert count(lengths, kept) == Counts(
        num_tokens=4, num_sequences=2, num_surviving_tokens=2, num_surviving_sequences=1
    )


def test_nothing_left_gives_zeros_and_says_so() -> None:
    lengths, kept = ints(2, 3), np.zeros(5, np.bool_)
    counts = count(lengths, kept)
    assert counts.is_empty
    for mode in Aggregation:
        assert rule(mode).by_token(lengths, counts, kept).tolist() == [0.0] * 5


# ---------------------------------------------------------------------- the same whatever the parts


def part(case: Case, sequences: list[int]) -> tuple[Case, list[int]]:
    """These sequences of the case, and which tokens they are."""
    spans = oracles.spans(case.lengths)
    tokens = [t for sequence in sequences for t in spans[sequence]]
    lengths = tuple(case.lengths[sequence] for sequence in sequences)
    columns = {
        name: getattr(case, name)[tokens] for name in Case.__annotations__ if name != "lengths"
    }
    return replace(case, lengths=lengths, **columns), tokens


def rejected(objective: Objective, case: Case) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    rho = np.exp(case.proximal - case.sampling)
    is_masking = isinstance(objective, CorrectedLoss)
    return ~((rho >= 0.5) & (rho <= 2)) if is_masking else np.zeros(rho.size, np.bool_)


def in_parts(
    objective: Objective, weights: LossWeights, case: Case, parts: list[list[int]]
) -> tuple[float, Floats]:
    """Loss and gradient of the update, its sequences laid out in these micro-batches."""
    cut = [part(case, sequences) for sequences in parts]
    kept = [~rejected(objective, piece) for piece, _ in cut]
    lengths = [np.array(piece.lengths, np.int64) for piece, _ in cut]
    of_update = add([count(n, k) for n, k in zip(lengths, kept, strict=True)])
    total, gradient = 0.0, np.zeros(case.now.size)
    for (piece, tokens), n, k in zip(cut, lengths, kept, strict=True):
        by_token = weights.by_token(n, of_update, k)
        losses, grads = losses_and_gradient(objective, piece, by_token)
        total += float(losses @ by_token)
        gradient[tokens] = grads
    return total, gradient


OBJECTIVES: list[Objective] = [
    ClippedLoss(),
    GspoLoss(),
    CorrectedLoss(
        inner=ClippedLoss(ratio_against=RatioAgainst.PROXIMAL),
        correction=Correction(weighting=Weighting.MASK, low=0.5, high=2.0),
    ),
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("mode", Aggregation)
def test_micro_batches_and_order_change_nothing(objective: Objective, mode: Aggregation) -> None:
    case = random_case(0, (3, 1, 7, 2, 5, 4, 1, 9))
    assert rejected(OBJECTIVES[2], case).any()
    whole = in_parts(objective, rule(mode), case, [list(range(8))])
    for parts in (
        [[0, 1, 2, 3], [4, 5, 6, 7]],
        [[7, 2], [0, 5], [6], [1, 3, 4]],
        [[5, 3, 1, 0, 2, 4, 6, 7]],
    ):
        total, gradient = in_parts(objective, rule(mode), case, parts)
        assert total == pytest.approx(whole[0], rel=1e-12)
        np.testing.assert_allclose(gradient, whole[1], rtol=1e-12, atol=1e-16)


def test_with_a_fixed_constant_twice_the_tokens_are_twice_the_gradient() -> None:
    once = random_case(0, (4, 3))
    _, first = in_parts(ClippedLoss(), rule(Aggregation.FIXED_CONSTANT), once, [[0, 1]])
    doubled, _ = part(once, [0, 0, 1])
    doubled = replace(doubled, lengths=(8, 3))
    _, second = in_parts(ClippedLoss(), rule(Aggregation.FIXED_CONSTANT), doubled, [[0, 1]])
    np.testing.assert_allclose(second[:4] + second[4:8], 2 * first[:4], rtol=1e-15)
    np.testing.assert_allclose(second[8:], first[4:], rtol=1e-15)
