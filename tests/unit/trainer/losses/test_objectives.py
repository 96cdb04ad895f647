# SPDX-License-Identifier: Apache-2.0
"""Policy losses against float64 written apart from them, and their gradients by differences."""

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
    by_sequence,
    check,
    losses_and_gradient,
    random_case,
    tokens_of,
)

from penstock.trainer.algorithms.cispo import CispoLoss
from penstock.trainer.algorithms.decoupled import DecoupledLoss
from penstock.trainer.algorithms.gspo import GspoLoss
from penstock.trainer.algorithms.m2po import M2poBudget, M2poLoss
from penstock.trainer.algorithms.opd import DistillationLoss
from penstock.trainer.algorithms.sapo import SapoLoss
from penstock.trainer.build_objective import WrappedBudget
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.divergence import EntropyBonus
from penstock.trainer.losses.ratios import RatioAgainst
from penstock.trainer.losses.tokens import BudgetedObjective, Objective

SEEDS = range(4)


def old(case: Case, against: RatioAgainst) -> Floats:
    return case.proximal if against is RatioAgainst.PROXIMAL else case.sampling


# ---------------------------------------------------------------------------------------------- PPO


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("against", RatioAgainst)
@pytest.mark.parametrize("delta", [math.inf, 1.6])
def test_clipped(seed: int, against: RatioAgainst, delta: float) -> None:
    case = random_case(seed)
    objective = ClippedLoss(epsilon=0.2, epsilon_high=0.28, delta=delta, ratio_against=against)
    check(
        objective,
        case,
        lambda now: oracles.clipped(now, old(case, against), case.advantages, 0.2, 0.28, delta),
    )


@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.9, 3.1])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_the_clip_is_flat_in_its_regions_and_plain_elsewhere(
    ratio: float, advantage: float
) -> None:
    base = random_case(0, (1,))
    case = replace(base, now=base.sampling + math.log(ratio), advantages=np.array([advantage]))
    _, gradient = losses_and_gradient(ClippedLoss(epsilon_high=0.28, delta=3.0), case)
    is_flat = ratio > 1.28 if advantage > 0 else (ratio < 0.8 or ratio > 3)
    assert gradient[0] == pytest.approx(0.0 if is_flat else -ratio * advantage)
    metrics = ClippedLoss(epsilon_high=0.28, delta=3.0)(tokens_of(case)).metrics
    assert bool(metrics["clip_ratio/low"] + metrics["clip_ratio/high"]) is is_flat
    assert bool(metrics["clip_ratio/low"]) is (is_flat and ratio < 1)


def test_what_is_told_of_the_ratio() -> None:
    case = random_case(1)
    metrics = ClippedLoss(ratio_against=RatioAgainst.PROXIMAL)(tokens_of(case)).metrics
    ratio = np.exp(case.now - case.sampling)
    np.testing.assert_allclose(metrics["ratio"].numpy(), ratio, rtol=1e-12)
    np.testing.assert_allclose(metrics["ratio/square"].numpy(), ratio**2, rtol=1e-12)
    np.testing.assert_allclose(metrics["kl"].numpy(), ratio - 1 - np.log(ratio), atol=1e-12)


# ---------------------------------------------------------------------------------------- decoupled


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("cap", [5.0, 1.1, math.inf])
def test_decoupled(seed: int, cap: float) -> None:
    case = random_case(seed)
    check(
        DecoupledLoss(max_weight=cap),
        case,
        lambda now: oracles.decoupled(now, case.proximal, case.sampling, case.advantages, 0.2, cap),
    )


def test_decoupled_with_the_sampling_policy_as_proximal_is_ppo() -> None:
    case = random_case(5)
    case = replace(case, proximal=case.sampling)
    for ours, theirs in zip(
        losses_and_gradient(DecoupledLoss(), case),
        losses_and_gradient(ClippedLoss(), case),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_decoupled_descends_the_on_policy_gradient_in_expectation() -> None:
    """Five actions, enumerated: E over the sampling policy, at now = proximal."""
    draw = np.random.default_rng(0)
    logits = torch.tensor(draw.standard_normal(5), requires_grad=True)
    sampling = torch.tensor(draw.standard_normal(5)).log_softmax(0)
    values = torch.tensor(draw.standard_normal(5))
    now = logits.log_softmax(0)
    tokens = replace(
        tokens_of(random_case(0, (1,) * 5), now),
        sampling_K=sampling,
        proximal_K=now.detach(),
        advantages_K=values,
    )
    out = DecoupledLoss(max_weight=math.inf)(tokens)
    (got,) = torch.autograd.grad((sampling.exp() * out.loss_K).sum(), logits, retain_graph=True)
    (want,) = torch.autograd.grad(-(now.exp() * values).sum(), logits)
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-14)


# --------------------------------------------------------------------------------------------- GSPO


def wide(low: float, high: float) -> GspoLoss:
    return GspoLoss(epsilon=low, epsilon_high=high)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("low", "high"), [(3e-4, 4e-4), (0.1, 0.15)])
def test_gspo_is_the_sequence_loss(seed: int, low: float, high: float) -> None:
    case, values = by_sequence(random_case(seed, spread=0.1))
    weights = 1 / np.repeat(case.lengths, case.lengths) / len(case.lengths)
    losses, gradient = losses_and_gradient(wide(low, high), case, weights)

    def whole(now: Floats) -> float:
        return oracles.gspo_mean(now, case.sampling, values, case.lengths, low, high)

    assert (losses * weights).sum() == pytest.approx(whole(case.now), rel=1e-12)
    np.testing.assert_allclose(gradient, oracles.differences(whole, case.now), atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_gspo_with_an_advantage_per_token(seed: int) -> None:
    case = random_case(seed, spread=0.1)
    held, low, high = case.now, 0.1, 0.15
    args = (case.sampling, case.advantages, case.lengths, low, high)
    check(wide(low, high), case, lambda now: oracles.gspo_tokens(now, held, *args))


def test_gspo_of_single_tokens_is_ppo() -> None:
    case = random_case(3, (1,) * 12)
    for ours, theirs in zip(
        losses_and_gradient(wide(0.2, 0.28), case),
        losses_and_gradient(ClippedLoss(epsilon_high=0.28), case),
        strict=True,
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------- CISPO, SAPO


@pytest.mark.parametrize("seed", SEEDS)
def test_cispo(seed: int) -> None:
    case = random_case(seed, spread=1.2)
    args = (case.now, case.sampling, case.advantages, 1.0, 4.0)
    check(CispoLoss(), case, lambda now: oracles.cispo(now, *args))


def test_cispo_caps_the_ratio_at_five_and_silences_nobody() -> None:
    case = random_case(2, spread=1.5)
    _, gradient = losses_and_gradient(CispoLoss(), case)
    ratio = np.exp(case.now - case.sampling)
    assert (ratio > 5).any()
    np.testing.assert_allclose(gradient, -np.minimum(ratio, 5) * case.advantages, rtol=1e-12)
    assert ((gradient != 0) == (case.advantages != 0)).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_sapo(seed: int) -> None:
    case = random_case(seed)
    args = (case.sampling, case.advantages, 1.0, 1.05)
    check(SapoLoss(), case, lambda now: oracles.sapo(now, *args))


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.05, 3.0])
def test_the_soft_gate_has_slope_one_at_one_and_falls_on_both_sides(tau: float) -> None:
    ratios = np.linspace(0.05, 4, 80)
    slopes: list[float] = []
    for ratio in [1.0, *ratios]:
        base = random_case(0, (1,))
        case = replace(base, now=base.sampling + np.log(ratio), advantages=np.array([1.0]))
        _, gradient = losses_and_gradient(SapoLoss(temperature_good=tau, temperature_bad=tau), case)
        slopes.append(-gradient[0] / ratio)
        sigma = 1 / (1 + math.exp(-tau * (ratio - 1)))
        assert slopes[-1] == pytest.approx(4 * sigma * (1 - sigma), rel=1e-9)
    assert slopes[0] == pytest.approx(1.0, rel=1e-12)
    steps = np.diff(slopes[1:])
    assert (steps[ratios[1:] <= 1] > 0).all() and (steps[ratios[:-1] >= 1] < 0).all()


# --------------------------------------------------------------------------------------------- M2PO


def settle(case: Case, budget: float) -> M2poLoss:
    rule = M2poBudget(budget=budget)
    region = rule.with_budget(rule.budget_terms(tokens_of(case)))
    assert isinstance(region, M2poLoss)
    return region


def kept(region: M2poLoss, case: Case) -> list[bool]:
    metrics = region(tokens_of(case)).metrics
    return (metrics["clip_ratio/low"] + metrics["clip_ratio/high"] == 0).tolist()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("budget", [0.002, 0.04, 0.3, 9.0])
def test_m2po(seed: int, budget: float) -> None:
    case = random_case(seed)
    keep = oracles.m2po_kept(case.now, case.sampling, case.advantages, budget)
    region = settle(case, budget)
    assert kept(region, case) == keep
    check(region, case, lambda now: oracles.m2po(now, case.sampling, case.advantages, keep))


@pytest.mark.parametrize("seed", range(20))
def test_m2po_against_brute_force_and_its_own_laws(seed: int) -> None:
    case = random_case(seed, (40, 1, 90, 69), spread=0.2)
    squares = (case.now - case.sampling) ** 2
    harmful = case.advantages * (case.now - case.sampling) > 0
    num_kept: list[int] = []
    for budget in (0.001, 0.01, 0.02, 0.04, 0.08, 1.0):
        keep = np.array(kept(settle(case, budget), case))
        assert keep.tolist() == oracles.m2po_kept(case.now, case.sampling, case.advantages, budget)
        if (keep & harmful).any():
            assert squares[keep & harmful].mean() <= budget
        assert (squares[~keep] > budget).all() and keep[~harmful].all()
        num_kept.append(int(keep.sum()))
    assert num_kept == sorted(num_kept) and num_kept[0] < num_kept[-1] == keep.size


def test_m2po_does_not_depend_on_order_or_sharding() -> None:
    case = random_case(0, (200, 300, 100))
    rule = M2poBudget()
    whole = rule.budget_terms(tokens_of(case))
    first = rule.with_budget(whole)
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        shards = whole[torch.randperm(whole.numel(), generator=draw)].tensor_split(4)
        assert rule.with_budget(torch.cat(shards[::-1])) == first


def test_equal_pressures_are_dropped_together_or_not_at_all() -> None:
    rule = M2poBudget(budget=0.04)
    region = rule.with_budget(torch.tensor([0.01, 0.09, 0.09, 0.09, 0.01], dtype=torch.float64))
    assert isinstance(region, M2poLoss)
    assert region.threshold == 0.09 and not region.is_all_dropped


def test_a_rounded_mean_drops_nobody_who_is_within_the_budget() -> None:
    equal = torch.full((3,), 0.1, dtype=torch.float64)
    assert float(equal.cumsum(0)[-1] / 3) > 0.1
    region = M2poBudget(budget=0.1).with_budget(equal)
    assert isinstance(region, M2poLoss)
    assert not region.is_all_dropped and region.threshold > 0.1


def test_an_alarm_is_told_when_no_harmful_token_is_left() -> None:
    base = random_case(0, (4,))
    now = base.sampling + np.array([0.5, 0.6, -0.7, -0.1])
    case = replace(base, now=now, advantages=np.array([1.0, 1.0, -1.0, 1.0]))
    metrics = settle(case, 0.04)(tokens_of(case)).metrics
    assert metrics["m2po/all_dropped"].tolist() == [1.0] * 4
    assert metrics["m2po/harmful"].tolist() == [1.0, 1.0, 1.0, 0.0]
    assert metrics["m2po/radius"].tolist() == pytest.approx([0.5] * 4)
    _, gradient = losses_and_gradient(settle(case, 0.04), case)
    assert (gradient[:3] == 0).all() and gradient[3] != 0
    calm = settle(case, 9.0)(tokens_of(case)).metrics
    assert calm["m2po/all_dropped"].sum() == 0 and calm["m2po/radius"].tolist() == [20.0] * 4


def test_a_backstop_bounds_tokens_that_the_budget_lets_pass() -> None:
    """They come back by themselves, but not by a step of e^4 at once."""
    base = random_case(0, (4,))
    logs, advantages = np.array([4.0, -4.0, 2.9, -2.9]), np.array([-1.0, 1.0, -1.0, 1.0])
    case = replace(base, now=base.sampling + logs, advantages=advantages)
    everyone = [True] * 4
    region = settle(case, 0.04)
    check(region, case, lambda now: oracles.m2po(now, case.sampling, advantages, everyone))
    losses, gradient = losses_and_gradient(region, case)
    assert losses[:2].tolist() == pytest.approx([20.0, -0.05])
    assert (gradient[:2] == 0).all() and (gradient[2:] != 0).all()


def test_m2po_without_a_harmful_token_keeps_everything() -> None:
    case = random_case(0, (4,))
    case = replace(case, advantages=np.zeros(4))
    region = settle(case, 0.04)
    assert region.threshold == math.inf and not region.is_all_dropped


def test_a_layer_around_m2po_is_settled_first() -> None:
    case = random_case(1)
    layered = WrappedBudget(
        budget=M2poBudget(), wrap=lambda inner: EntropyBonus(inner=inner, coef=0.1)
    )
    assert isinstance(layered, BudgetedObjective) and not isinstance(
        ClippedLoss(), BudgetedObjective
    )
    objective = layered.with_budget(layered.budget_terms(tokens_of(case)))
    want = settle(case, 0.04)(tokens_of(case)).loss_K - 0.1 * torch.tensor(case.entropy)
    assert torch.equal(objective(tokens_of(case)).loss_K, want)


# ------------------------------------------------------------------------------------- distillation


@pytest.mark.parametrize("seed", SEEDS)
def test_distilled(seed: int) -> None:
    case = random_case(seed)
    gap = case.teacher - case.now
    objective = DistillationLoss(inner=ClippedLoss())
    check(objective, case, lambda now: oracles.clipped(now, case.sampling, gap, 0.2, 0.2))


def test_distillation_descends_the_reverse_kl_to_the_teacher() -> None:
    """Five symbols, enumerated, sampled by other weights than today's."""
    draw = np.random.default_rng(1)
    logits = torch.tensor(draw.standard_normal(5), requires_grad=True)
    sampling, teacher = torch.tensor(draw.standard_normal((2, 5))).log_softmax(1)
    now = logits.log_softmax(0)
    tokens = replace(
        tokens_of(random_case(0, (1,) * 5), now),
        sampling_K=sampling,
        extra_columns={"teacher_logprobs": teacher},
    )
    out = DistillationLoss(inner=ClippedLoss(epsilon=1.0, epsilon_high=math.inf))(tokens)
    (got,) = torch.autograd.grad((sampling.exp() * out.loss_K).sum(), logits, retain_graph=True)
    (want,) = torch.autograd.grad((now.exp() * (now - teacher)).sum(), logits)
    np.testing.assert_allclose(got.numpy(), want.numpy(), atol=1e-14)


# ------------------------------------------------------------------------------------- all of them

EVERY: list[Objective] = [
    ClippedLoss(),
    ClippedLoss(ratio_against=RatioAgainst.PROXIMAL, delta=3.0),
    DecoupledLoss(),
    GspoLoss(),
    CispoLoss(),
    SapoLoss(),
    M2poLoss(threshold=0.09, is_all_dropped=False),
    DistillationLoss(inner=SapoLoss()),
]


@pytest.mark.parametrize("objective", EVERY, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("recorded", [-1e38, -200.0])
def test_one_absurd_record_leaves_every_gradient_a_number(
    objective: Objective, recorded: float
) -> None:
    for sign in (1.0, -1.0):
        case = random_case(0)
        case.sampling[4], case.advantages[4] = recorded, sign
        losses, gradient = losses_and_gradient(objective, case)
        assert np.isfinite(losses).all() and np.isfinite(gradient).all()


@pytest.mark.parametrize(
    ("objective", "column"),
    [
        (DecoupledLoss(), "proximal_logprobs"),
        (ClippedLoss(ratio_against=RatioAgainst.PROXIMAL), "proximal_logprobs"),
        (DistillationLoss(inner=ClippedLoss()), "teacher_logprobs"),
    ],
)
def test_a_missing_column_is_named(objective: Objective, column: str) -> None:
    tokens = replace(tokens_of(random_case(0)), proximal_K=None, extra_columns=None)
    with pytest.raises(ValueError, match=column):
        objective(tokens)


@pytest.mark.parametrize("objective", EVERY, ids=lambda one: type(one).__name__)
def test_a_rank_without_tokens_has_no_loss(objective: Objective) -> None:
    losses, gradient = losses_and_gradient(objective, random_case(0, ()))
    assert losses.size == gradient.size == 0
