# SPDX-License-Identifier: Apache-2.0
"""Corrections for engine mismatch: which tokens are weighed by what, and which are set aside."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.trainer import oracles
from tests.unit.trainer.cases import (
    Case,
    Floats,
    check,
    losses_and_gradient,
    random_case,
    tokens_of,
)

from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.mismatch import (
    CorrectedLoss,
    Correction,
    SequenceRatio,
    Weighting,
)
from penstock.trainer.losses.ratios import RatioAgainst

PPO = ClippedLoss(ratio_against=RatioAgainst.PROXIMAL)
HAND = torch.tensor([0.2, -1.2, 0.9, -8.0, 0.5], dtype=torch.float64)
NONE = torch.zeros(5, dtype=torch.float64)


def survivors(correction: Correction, log_rho: torch.Tensor, lengths: list[int]) -> list[bool]:
    sequences = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return correction.survivors(log_rho, torch.zeros_like(log_rho), sequences).tolist()


def test_the_hand_vector() -> None:
    rho = [1.2214, 0.3012, 2.4596, 3.3546e-4, 1.6487]
    tis = Correction(weighting=Weighting.TRUNCATE, high=2.0)
    want = [rho[0], rho[1], 2.0, rho[3], rho[4]]
    assert tis.weights(HAND, NONE).tolist() == pytest.approx(want, rel=1e-4)
    assert all(survivors(tis, HAND, [5]))
    icepop = Correction(weighting=Weighting.MASK, low=0.5, high=2.0)
    assert icepop.weights(HAND, NONE).tolist() == pytest.approx(rho, rel=1e-4)
    assert survivors(icepop, HAND, [5]) == [True, False, False, False, True]
    token_mis = Correction(weighting=Weighting.MASK, high=2.0)
    assert survivors(token_mis, HAND, [5]) == [True, True, False, True, True]
    none = Correction(weighting=Weighting.NONE)
    assert none.weights(HAND, NONE).tolist() == [1.0] * 5


def test_a_sequence_is_judged_by_its_product_or_its_mean() -> None:
    """Products e^-1.0, e^-7.1 and e^0.5; geometric means e^-0.5, e^-3.55 and e^0.5."""
    log_rho = torch.tensor([0.2, -1.2, 0.9, -8.0, 0.5], dtype=torch.float64)
    plain = Correction(weighting=Weighting.NONE, sequence_low=0.5, sequence_high=2.0)
    product = replace(plain, sequence=SequenceRatio.SUM)
    assert survivors(product, log_rho, [2, 2, 1]) == [False, False, False, False, True]
    mean = replace(plain, sequence=SequenceRatio.GEOMETRIC)
    assert survivors(mean, log_rho, [2, 2, 1]) == [True, True, False, False, True]
    assert all(survivors(plain, log_rho, [2, 2, 1]))


def test_one_impossible_token_vetoes_its_sequence_alone() -> None:
    log_rho = torch.tensor([0.0, -9.3, 0.0, -9.1, 0.0], dtype=torch.float64)
    veto = Correction(weighting=Weighting.NONE, veto=1e-4)
    assert survivors(veto, log_rho, [3, 2]) == [False, False, False, True, True]


def oracle(case: Case, now: Floats, weights: Floats, kept: list[bool]) -> Floats:
    return np.where(kept, weights, 0.0) * oracles.clipped(
        now, case.proximal, case.advantages, 0.2, 0.2
    )


@pytest.mark.parametrize("seed", range(3))
def test_corrected_losses_and_gradients(seed: int) -> None:
    case = random_case(seed)
    rho = np.exp(case.proximal - case.sampling)
    everyone = [True] * rho.size
    tis = CorrectedLoss(inner=PPO, correction=Correction(high=1.2))
    check(tis, case, lambda now: oracle(case, now, np.minimum(rho, 1.2), everyone))
    inside = [bool(0.8 <= value <= 1.5) for value in rho]
    assert any(inside) and not all(inside)
    icepop = Correction(weighting=Weighting.MASK, low=0.8, high=1.5)
    check(
        CorrectedLoss(inner=PPO, correction=icepop),
        case,
        lambda now: oracle(case, now, rho, inside),
    )
    log_rho = case.proximal - case.sampling
    kept = list[bool]()
    for span in oracles.spans(case.lengths):
        mean = math.exp(sum(log_rho[t] for t in span) / len(span))
        kept += [bool(0.9 <= mean <= 1.2)] * len(span)
    sequences = Correction(
        weighting=Weighting.NONE,
        sequence=SequenceRatio.GEOMETRIC,
        sequence_low=0.9,
        sequence_high=1.2,
    )
    check(
        CorrectedLoss(inner=PPO, correction=sequences),
        case,
        lambda now: oracle(case, now, np.ones(rho.size), kept),
    )


def test_what_is_told() -> None:
    case = random_case(0)
    icepop = Correction(weighting=Weighting.MASK, low=0.8, high=1.5)
    metrics = CorrectedLoss(inner=PPO, correction=icepop)(tokens_of(case)).metrics
    rho = np.exp(case.proximal - case.sampling)
    inside = (rho >= 0.8) & (rho <= 1.5)
    assert metrics["mismatch/rejected"].tolist() == (~inside).astype(float).tolist()
    np.testing.assert_allclose(metrics["mismatch/weight"].numpy(), np.where(inside, rho, 0))
    np.testing.assert_allclose(metrics["mismatch/k3"].numpy(), rho - 1 - np.log(rho), atol=1e-12)
    assert "clip_ratio/low" in metrics


def test_a_missing_column_is_refused() -> None:
    with pytest.raises(ValueError, match="proximal_logprobs"):
        CorrectedLoss(
            inner=ClippedLoss(ratio_against=RatioAgainst.PROXIMAL), correction=Correction()
        )(replace(tokens_of(random_case(0)), proximal_K=None))


@pytest.mark.parametrize("recorded", [-1e38, 0.0])
def test_an_absurd_record_stays_a_number(recorded: float) -> None:
    case = random_case(0)
    case.sampling[3] = recorded
    correction = Correction(weighting=Weighting.MASK, sequence=SequenceRatio.SUM, veto=1e-4)
    losses, gradient = losses_and_gradient(CorrectedLoss(inner=PPO, correction=correction), case)
    assert np.isfinite(losses).all() and np.isfinite(gradient).all()
