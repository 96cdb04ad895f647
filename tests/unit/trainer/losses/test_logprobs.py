# SPDX-License-Identifier: Apache-2.0
"""Log-probs against float64 NumPy written apart from them, and against central differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from penstock.trainer.losses.logprobs import Truncation, entropy, sampling_log_softmax
from penstock.trainer.losses.ratios import k3, log_ratio

Floats = npt.NDArray[np.float64]
DRAW = np.random.default_rng(0)


def oracle_logprobs(
    logits: Floats, target: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> Floats:
    """One token: temperature, min-p, top-k, top-p; the sampled token stays. No ties here."""
    scaled = logits / temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    order = [i for i in order if np.exp(scaled[i] - scaled[order[0]]) >= min_p]
    kept = order[: top_k or None]
    weights = [float(np.exp(scaled[i] - scaled[order[0]])) for i in kept]
    total, running, nucleus = sum(weights), 0.0, list[int]()
    for index, weight in zip(kept, weights, strict=True):
        if running / total >= top_p and top_p < 1:
            break
        nucleus.append(index)
        running += weight
    if target not in nucleus:
        nucleus.append(target)
    out = np.full(len(scaled), -np.inf)
    normaliser = np.log(sum(np.exp(scaled[i]) for i in nucleus))
    for index in nucleus:
        out[index] = scaled[index] - normaliser
    return out


@pytest.mark.parametrize("top_k", [0, 1, 3, 7, 99])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("min_p", [0.0, 0.15])
def test_log_probs_under_a_spec(top_k: int, top_p: float, min_p: float) -> None:
    logits = DRAW.standard_normal((20, 7)) * 2
    targets = DRAW.integers(0, 7, 20)
    temperature = DRAW.uniform(0.3, 2.0, 20)
    got = sampling_log_softmax(
        torch.tensor(logits),
        torch.tensor(targets),
        torch.tensor(temperature),
        Truncation(
            top_k_K=torch.full((20,), top_k),
            top_p_K=torch.full((20,), top_p),
            min_p_K=torch.full((20,), min_p),
        ),
    ).numpy()
    for k in range(20):
        want = oracle_logprobs(logits[k], int(targets[k]), temperature[k], top_k, top_p, min_p)
        kept = np.isfinite(want)
        np.testing.assert_allclose(got[k][kept], want[kept], rtol=1e-12, atol=1e-14)
        assert (got[k][~kept] < -1e29).all()


def test_entropy_of_a_truncated_distribution_is_finite_and_right() -> None:
    logits = torch.tensor([[0.0, 0.0, 5.0, -3.0]], dtype=torch.float64, requires_grad=True)
    kept = Truncation(
        top_k_K=torch.tensor([1]), top_p_K=torch.tensor([1.0]), min_p_K=torch.tensor([0.0])
    )
    logprobs = sampling_log_softmax(logits, torch.tensor([0]), None, kept)
    p = 1 / (1 + np.exp(5.0))
    value = entropy(logprobs)
    assert value.item() == pytest.approx(-(p * np.log(p) + (1 - p) * np.log(1 - p)))
    value.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("recorded", [-1e38, -3.4e38, -200.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_one_absurd_record_leaves_all_gradients_numbers(recorded: float, advantage: float) -> None:
    now = torch.full((3,), -0.5, requires_grad=True)
    behaviour = torch.tensor([-0.5, -0.6, recorded])
    advantages = torch.tensor([1.0, -1.0, advantage])
    ratio = log_ratio(now, behaviour)
    loss = -(ratio.exp().clamp(max=3.0) * advantages).sum()
    loss.backward()
    assert now.grad is not None and torch.isfinite(loss)
    np.testing.assert_allclose(now.grad.numpy(), [-1.0, np.exp(0.1), 0.0], rtol=1e-6)
    assert torch.isfinite(k3(ratio)).all()


def test_k3_is_unbiased_and_never_negative() -> None:
    behaviour = np.array([0.5, 0.3, 0.2])
    current = np.array([0.4, 0.4, 0.2])
    values = k3(torch.tensor(np.log(current / behaviour)))
    assert (values >= 0).all()
    exact = float((behaviour * np.log(behaviour / current)).sum())
    assert float((torch.tensor(behaviour) * values).sum()) == pytest.approx(exact)


def central_differences(function: Callable[[Tensor], Tensor], at: Floats) -> Floats:
    out = np.zeros_like(at)
    for index in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[index] = 1e-6
        above, below = function(torch.tensor(at + step)), function(torch.tensor(at - step))
        out[index] = (above.item() - below.item()) / 2e-6
    return out


@pytest.mark.parametrize("truncated", [False, True])
def test_the_gradient_in_the_logits_by_central_differences(truncated: bool) -> None:
    draw = np.random.default_rng(3)
    logits = draw.standard_normal((12, 5))
    targets = torch.tensor(draw.integers(0, 5, 12))
    behaviour = torch.tensor(draw.uniform(-2.5, -0.5, 12))
    advantages = torch.tensor(draw.standard_normal(12))
    temperature = torch.tensor(draw.uniform(0.5, 1.5, 12))
    kept = Truncation(
        top_k_K=torch.full((12,), 4),
        top_p_K=torch.full((12,), 0.95, dtype=torch.float64),
        min_p_K=torch.full((12,), 0.05, dtype=torch.float64),
    )

    def loss(values: Tensor) -> Tensor:
        spec = (temperature, kept if truncated else None)
        logprobs = sampling_log_softmax(values, targets, *spec)
        chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
        policy = ((chosen - behaviour).exp() * advantages).sum()
        return policy - 0.01 * entropy(logprobs).sum()

    at = torch.tensor(logits, requires_grad=True)
    loss(at).backward()
    assert at.grad is not None
    np.testing.assert_allclose(at.grad.numpy(), central_differences(loss, logits), atol=1e-7)
