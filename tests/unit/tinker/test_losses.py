# SPDX-License-Identifier: Apache-2.0
"""Each loss against its formula, and its settings."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import BadRequest
from penstock.tinker.losses import read_loss
from penstock.trainer.losses.tokens import Tokens

LOGPROBS = torch.tensor([-1.0, -0.5, -2.0, -0.1])
SAMPLED = torch.tensor([-1.5, -0.4, -0.5, -0.1])
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -0.5])
RATIO = (LOGPROBS - SAMPLED).exp()


def loss_and_gradient(name: str, **settings: float) -> tuple[float, list[float]]:
    logprobs = LOGPROBS.clone().requires_grad_()
    tokens = Tokens(
        logprobs_K=logprobs,
        entropy_K=torch.zeros(4),
        sampling_K=SAMPLED,
        advantages_K=ADVANTAGES,
        sequences_K=torch.tensor([0, 0, 1, 1]),
        staleness_K=torch.zeros(4),
    )
    total = read_loss(name, settings).objective(tokens).loss_K.sum()
    total.backward()
    assert logprobs.grad is not None
    return float(total.detach()), logprobs.grad.tolist()


def test_formulas() -> None:
    loss, gradient = loss_and_gradient("cross_entropy")
    assert loss == pytest.approx(float(-(LOGPROBS * ADVANTAGES).sum()))
    assert gradient == pytest.approx((-ADVANTAGES).tolist())
    loss, gradient = loss_and_gradient("importance_sampling")
    assert loss == pytest.approx(float(-(RATIO * ADVANTAGES).sum()))
    assert gradient == pytest.approx((-RATIO * ADVANTAGES).tolist())
    clipped = torch.minimum(RATIO * ADVANTAGES, RATIO.clamp(0.8, 1.2) * ADVANTAGES)
    loss, gradient = loss_and_gradient("ppo")
    assert loss == pytest.approx(float(-clipped.sum()))
    assert gradient[0] == 0  # beyond the upper bound, with a positive advantage
    wide, _ = loss_and_gradient("ppo", clip_low_threshold=0.0, clip_high_threshold=9.0)
    assert wide == pytest.approx(float(-(RATIO * ADVANTAGES).sum()))
    loss, gradient = loss_and_gradient("cispo")
    weights = RATIO.clamp(0.8, 1.2) * ADVANTAGES
    assert loss == pytest.approx(float(-(weights * LOGPROBS).sum()))
    assert gradient == pytest.approx((-weights).tolist())
    loss, _ = loss_and_gradient("dro", beta=0.1)
    moved = (LOGPROBS - SAMPLED) ** 2
    assert loss == pytest.approx(float((0.05 * moved - LOGPROBS * ADVANTAGES).sum()))


def test_settings_and_names() -> None:
    with pytest.raises(BadRequest, match="no loss 'x' here"):
        read_loss("x", {})
    with pytest.raises(BadRequest, match="has no setting beta"):
        read_loss("ppo", {"beta": 1.0})
    with pytest.raises(BadRequest, match="clip thresholds"):
        read_loss("ppo", {"clip_low_threshold": 1.1})
