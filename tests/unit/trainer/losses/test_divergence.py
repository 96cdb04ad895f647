# SPDX-License-Identifier: Apache-2.0
"""KL estimates against the exact divergence of small distributions, and their gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.trainer import oracles
from tests.unit.trainer.cases import Floats, check, losses_and_gradient, random_case, tokens_of

from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.divergence import EntropyBonus, KlPenalty
from penstock.trainer.losses.ratios import k3, log_ratio
from penstock.trainer.losses.tokens import TokenLoss, Tokens


class Nothing:
    """An objective without a loss."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return TokenLoss(loss_K=torch.zeros_like(tokens.sampling_K), metrics={})


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cap", [5.0, 1.1])
def test_a_policy_loss_with_kl(seed: int, cap: float) -> None:
    case = random_case(seed)

    def oracle(now: Floats) -> Floats:
        ratio = np.minimum(np.exp(now - case.sampling), cap)
        policy = oracles.clipped(now, case.sampling, case.advantages, 0.2, 0.2)
        return policy + 0.3 * ratio * oracles.kl("k3", now, case.reference)

    check(KlPenalty(inner=ClippedLoss(), coef=0.3, max_ratio=cap), case, oracle)


def distributions(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits now, log-probs of the sampling policy, of the reference) over five symbols."""
    draw = torch.tensor(np.random.default_rng(seed).standard_normal((3, 5)))
    sampling, reference = draw[1:].log_softmax(1)
    return draw[0].requires_grad_(), sampling, reference


@pytest.mark.parametrize("seed", range(5))
def test_it_descends_the_exact_kl_from_tokens_of_another_policy(seed: int) -> None:
    """In expectation, by enumeration; the value is the KL too."""
    logits, sampling, reference = distributions(seed)
    now = logits.log_softmax(0)
    tokens = replace(
        tokens_of(random_case(0, (1,) * 5), now), sampling_K=sampling, reference_K=reference
    )
    term = KlPenalty(inner=Nothing(), coef=1.0, max_ratio=math.inf)(tokens).loss_K
    expected = (sampling.exp() * term).sum()
    exact = (now.exp() * (now - reference)).sum()
    (got,) = torch.autograd.grad(expected, logits, retain_graph=True)
    (want,) = torch.autograd.grad(exact, logits)
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-13)
    assert expected.item() == pytest.approx(exact.item())


def test_draws_average_to_the_exact_kl() -> None:
    logits, _, reference = distributions(7)
    now = logits.detach().log_softmax(0)
    draws = np.random.default_rng(3).choice(5, 100_000, p=now.exp().numpy())
    values = k3(log_ratio(reference[draws], now[draws])).numpy()
    exact = float((now.exp() * (now - reference)).sum())
    z = (values.mean() - exact) / (values.std() / math.sqrt(values.size))
    assert abs(z) < 3
    assert (values >= 0).all()


def test_an_impossible_reference_stays_a_number() -> None:
    case = random_case(0)
    case.reference[2], case.reference[3] = -1e38, 1e3
    losses, gradient = losses_and_gradient(KlPenalty(inner=ClippedLoss()), case)
    assert np.isfinite(losses).all() and np.isfinite(gradient).all()


def test_without_a_reference_the_column_is_named() -> None:
    tokens = replace(tokens_of(random_case(0)), reference_K=None)
    with pytest.raises(ValueError, match="reference_logprobs"):
        KlPenalty(inner=ClippedLoss())(tokens)


def test_the_entropy_bonus() -> None:
    case = random_case(0)
    tokens = tokens_of(case)
    entropy = tokens.entropy_K.clone().requires_grad_()
    out = EntropyBonus(inner=ClippedLoss(), coef=0.02)(replace(tokens, entropy_K=entropy))
    plain = ClippedLoss()(tokens)
    np.testing.assert_allclose(
        out.loss_K.detach().numpy(), plain.loss_K.numpy() - 0.02 * case.entropy, atol=1e-15
    )
    (gradient,) = torch.autograd.grad(out.loss_K.sum(), entropy)
    assert gradient.tolist() == pytest.approx([-0.02] * case.now.size)
    assert out.metrics.keys() == plain.metrics.keys()
