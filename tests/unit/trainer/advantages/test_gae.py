# SPDX-License-Identifier: Apache-2.0
"""GAE against the explicit double sum, and the critic's loss with its gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.unit.trainer import oracles
from tests.unit.trainer.cases import Floats, random_case, tokens_of

from penstock.trainer.advantages.gae import ValueLoss, estimate_advantages


def ragged(
    seed: int,
) -> tuple[Floats, Floats, np.ndarray[tuple[int], np.dtype[np.bool_]], list[int]]:
    """(rewards, values, mask, lengths) of samples with context inside, one with nothing trained."""
    draw = np.random.default_rng(seed)
    lengths = [5, 1, 12, 3, 30, 4]
    num = sum(lengths)
    mask = draw.random(num) < 0.6
    mask[18:21] = False  # the fourth sample
    return draw.standard_normal(num), draw.standard_normal(num), mask, lengths


def explicit(
    rewards: Floats,
    values: Floats,
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]],
    lengths: list[int],
    after: Floats,
    discount: float,
    lam: float,
) -> tuple[Floats, Floats]:
    advantages, returns = np.zeros(mask.size), np.zeros(mask.size)
    for sample, span in enumerate(oracles.spans(lengths)):
        trained = [t for t in span if mask[t]]
        one, other = oracles.gae(
            [float(rewards[t]) for t in trained],
            [float(values[t]) for t in trained],
            float(after[sample]),
            discount,
            lam,
        )
        advantages[trained], returns[trained] = one, other
    return advantages, returns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("discount", [1.0, 0.9])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.0])
@pytest.mark.parametrize("is_truncated", [False, True])
def test_against_the_double_sum(seed: int, discount: float, lam: float, is_truncated: bool) -> None:
    rewards, values, mask, lengths = ragged(seed)
    after = np.array([0.0, 2.0, -1.0, 3.0, 0.5, 0.0]) * is_truncated
    bootstrap, ends = after if is_truncated else None, np.cumsum(lengths)
    got = estimate_advantages(rewards, values, mask, ends, bootstrap, discount=discount, lam=lam)
    want = explicit(rewards, values, mask, lengths, after, discount, lam)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-13)
        assert (ours[~mask] == 0).all()


def chain(
    values: list[float], rewards: list[float], *, discount: float = 1.0, lam: float = 1.0
) -> tuple[Floats, Floats]:
    mask, ends = np.ones(len(values), np.bool_), np.array([len(values)])
    return estimate_advantages(
        np.array(rewards), np.array(values), mask, ends, discount=discount, lam=lam
    )


def test_the_two_ends_of_the_trace() -> None:
    values, rewards = [0.5, 0.2, -0.4], [0.1, 0.0, 1.0]
    whole, _ = chain(values, rewards, discount=0.9)
    sums = [0.1 + 0.81, 0.9, 1.0]
    assert whole.tolist() == pytest.approx([s - v for s, v in zip(sums, values, strict=True)])
    single, _ = chain(values, rewards, discount=0.9, lam=0.0)
    assert single.tolist() == pytest.approx([0.1 + 0.18 - 0.5, -0.36 - 0.2, 1.0 + 0.4])


def test_without_values_every_token_has_the_outcome() -> None:
    advantages, returns = chain([0.0] * 4, [0.0, 0.0, 0.0, 0.7])
    assert advantages.tolist() == returns.tolist() == [0.7] * 4


def test_a_sample_without_a_reward_teaches_nothing() -> None:
    rewards, values, mask, lengths = ragged(0)
    plain, _ = estimate_advantages(rewards, values, mask, np.cumsum(lengths), lam=0.9)
    last = np.flatnonzero(mask[:18])[-1]
    rewards[last] = math.nan
    got, returns = estimate_advantages(rewards, values, mask, np.cumsum(lengths), lam=0.9)
    assert (got[6:18] == 0).all()
    np.testing.assert_array_equal(returns[6:18], np.where(mask, values, 0)[6:18])
    others = np.r_[0:6, 18:55]
    np.testing.assert_array_equal(got[others], plain[others])


def test_an_empty_batch() -> None:
    none = np.zeros(0)
    got, _ = estimate_advantages(none, none, np.zeros(0, np.bool_), np.zeros(0, np.int64))
    assert got.size == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_value_loss_and_its_gradient(seed: int) -> None:
    draw = np.random.default_rng(seed)
    old, returns = draw.standard_normal((2, 18))
    now = old + 0.3 * draw.standard_normal(18)
    values = torch.tensor(now, requires_grad=True)
    columns = {
        "values": torch.tensor(old),
        "values_now": values,
        "returns": torch.tensor(returns),
    }
    out = ValueLoss(clip=0.2)(replace(tokens_of(random_case(0)), extra_columns=columns))
    want = oracles.value_loss(now, old, returns, 0.2)
    np.testing.assert_allclose(out.loss_K.detach().numpy(), want, rtol=1e-12)
    (gradient,) = torch.autograd.grad(out.loss_K.sum(), values)
    numeric = oracles.differences(
        lambda at: float(oracles.value_loss(at, old, returns, 0.2).sum()), now
    )
    np.testing.assert_allclose(gradient.numpy(), numeric, atol=1e-7)
    assert 0 < float(out.metrics["value/clip_ratio"].sum()) < 18
    assert not any(value.requires_grad for value in out.metrics.values())


def test_missing_value_columns_are_named() -> None:
    with pytest.raises(ValueError, match=r"\['values_now', 'returns'\]"):
        ValueLoss()(replace(tokens_of(random_case(0)), extra_columns={"values": torch.zeros(18)}))
