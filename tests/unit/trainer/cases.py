# SPDX-License-Identifier: Apache-2.0
"""Small random micro-batches for the objectives' tests, as arrays and as `Tokens`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from tests.unit.trainer import oracles
from torch import Tensor

from penstock.trainer.losses.tokens import Objective, Tokens

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Case:
    lengths: tuple[int, ...]
    now: Floats
    sampling: Floats
    proximal: Floats
    reference: Floats
    teacher: Floats
    entropy: Floats
    advantages: Floats

    @property
    def sequences(self) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(len(self.lengths)), self.lengths)


def random_case(
    seed: int, lengths: tuple[int, ...] = (3, 1, 7, 2, 5), *, spread: float = 0.4
) -> Case:
    draw = np.random.default_rng(seed)
    num = sum(lengths)
    sampling = draw.uniform(-3, -0.2, num)
    proximal = sampling + spread * draw.standard_normal(num)
    now = proximal + spread * draw.standard_normal(num)
    advantages = draw.standard_normal(num)
    advantages[::6] = 0
    return Case(
        lengths=lengths,
        now=now,
        sampling=sampling,
        proximal=proximal,
        reference=now + 0.5 * draw.standard_normal(num),
        teacher=now + 0.5 * draw.standard_normal(num),
        entropy=draw.random(num),
        advantages=advantages,
    )


def by_sequence(case: Case) -> tuple[Case, Floats]:
    """The case with one advantage per sequence, and these."""
    values = np.random.default_rng(99).standard_normal(len(case.lengths))
    return replace(case, advantages=np.repeat(values, case.lengths)), values


def tokens_of(case: Case, now: Tensor | None = None) -> Tokens:
    return Tokens(
        logprobs_K=torch.tensor(case.now) if now is None else now,
        entropy_K=torch.tensor(case.entropy),
        sampling_K=torch.tensor(case.sampling),
        advantages_K=torch.tensor(case.advantages),
        sequences_K=torch.tensor(case.sequences),
        staleness_K=torch.tensor(np.arange(case.now.size) % 3),
        proximal_K=torch.tensor(case.proximal),
        reference_K=torch.tensor(case.reference),
        extra_columns={"teacher_logprobs": torch.tensor(case.teacher)},
    )


def losses_and_gradient(
    objective: Objective, case: Case, weights: Floats | None = None
) -> tuple[Floats, Floats]:
    """By token, and of their weighted sum in the log-probs now."""
    now = torch.tensor(case.now, requires_grad=True)
    out = objective(tokens_of(case, now))
    assert all(not value.requires_grad for value in out.metrics.values())
    assert all(value.shape == now.shape for value in out.metrics.values())
    weighted = out.loss_K if weights is None else out.loss_K * torch.tensor(weights)
    (gradient,) = torch.autograd.grad(weighted.sum(), now)
    return out.loss_K.detach().numpy(), gradient.numpy()


def check(objective: Objective, case: Case, oracle: Callable[[Floats], Floats]) -> None:
    """Losses equal the oracle's, and the gradient its central differences."""
    losses, gradient = losses_and_gradient(objective, case)
    np.testing.assert_allclose(losses, oracle(case.now), rtol=1e-12, atol=1e-13)
    numeric = oracles.differences(lambda now: float(oracle(now).sum()), case.now)
    np.testing.assert_allclose(gradient, numeric, rtol=1e-6, atol=1e-7)
