# SPDX-License-Identifier: Apache-2.0
"""A step over instalments: the same as one over the complete batch, however it is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.unit.trainer.doubles import (
    POLICY,
    VOCAB_SIZE,
    Sealed,
    credited,
    make_learner,
    make_turn,
    random_batch,
    seal,
    settings,
)
from tests.unit.trainer.test_learner import assert_same_bits, parameters
from transformers import PreTrainedModel

from penstock.trainer.batches import assemble, join_batches
from penstock.trainer.build import build_models
from penstock.trainer.learner import Learner, SkipReason, Stats
from penstock.trainer.losses.aggregation import Aggregation, LossWeights
from penstock.trainer.losses.tokens import TokenLoss, Tokens
from penstock.trainer.models import Models
from penstock.trainer.pipeline.run import Pipeline
from penstock.trainer.replay import is_compared
from penstock.trainer.streaming import StreamedStep
from penstock.types import log_probs

NewModel = Callable[[], PreTrainedModel]
CUTS = [(1, 1, 1, 1), (2, 2), (3, 1), (1, 3, 0), (4,)]
STREAMED = [one for one in Aggregation if one is not Aggregation.TOKEN_MEAN]
NUM_SEQUENCES = 16
"""Of a batch of four groups of four."""


def learner(model: PreTrainedModel, aggregation: Aggregation) -> Learner:
    weights = LossWeights(aggregation=aggregation, constant_length=8)
    return make_learner(model, weights=weights, bounds=(0.2, 0.2), micro_batch_tokens=24)


def stream(
    actor: Learner, sealed: Sealed, sizes: Sequence[int], expected: int = NUM_SEQUENCES
) -> Stats:
    step = StreamedStep(actor, Pipeline(()), num_sequences=expected)
    for part in sealed.cut(sizes):
        step.add(part.assembled() if part.manifest.groups else assembled(part))
    return step.finish()


def assembled(sealed: Sealed) -> Any:
    return assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)


def compared(stats: Stats) -> dict[str, float]:
    return {name: value for name, value in stats.values.items() if is_compared(name)}


def distance(left: Learner, right: Learner) -> float:
    others = parameters(right)
    return max(
        float((value.double() - others[name].double()).abs().max())
        for name, value in parameters(left).items()
    )


def test_instalments_joined_are_the_batch() -> None:
    names = ["solver", "", "critic", "solver"]
    sealed = seal(
        [
            [(replace(make_turn([3, 4], [5] * n), role=role), float(n)) for n in (1, 2)]
            for role in names
        ]
    )
    groups = tuple(
        replace(
            group,
            rows=tuple(
                structs.replace(
                    row,
                    roles={POLICY: {role: row.sampled[POLICY]}},
                    values={"x": float(n)} | ({"reward.critic": 0.5} if role == "critic" else {}),
                )
                for row in group.rows
            ),
        )
        for n, (group, role) in enumerate(zip(sealed.manifest.groups, names, strict=True))
    )
    sealed = replace(sealed, manifest=replace(sealed.manifest, groups=groups))
    whole = credited(assembled(sealed))
    joined = join_batches([credited(assembled(part)) for part in sealed.cut((2, 1, 1))])
    assert whole.roles.names == ("", "critic", "solver") and {*whole.samples.roles_T} == {0, 1, 2}
    for one in fields(whole):
        assert_equal(getattr(joined, one.name), getattr(whole, one.name), one.name)


def assert_equal(left: Any, right: Any, name: str) -> None:
    """Of arrays too, wherever they are."""
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype, name
        np.testing.assert_array_equal(left, right, err_msg=name)
    elif isinstance(left, Mapping):
        assert left.keys() == right.keys(), name
        for key in left:
            assert_equal(left[key], right[key], f"{name}.{key}")
    elif hasattr(left, "__dataclass_fields__"):
        for one in fields(left):
            assert_equal(getattr(left, one.name), getattr(right, one.name), f"{name}.{one.name}")
    else:
        assert left == right, name


@pytest.mark.parametrize("aggregation", STREAMED)
def test_the_bits_do_not_depend_on_the_instalments(
    new_model: NewModel, aggregation: Aggregation
) -> None:
    results: list[tuple[dict[str, torch.Tensor], list[dict[str, float]]]] = []
    for sizes in CUTS:
        actor = learner(new_model(), aggregation)
        stats = [stream(actor, random_batch(5, seq=seq), sizes) for seq in (1, 2, 3)]
        results.append((parameters(actor), [compared(one) for one in stats]))
    for weights, stats in results[1:]:
        assert_same_bits(weights, results[0][0])
        assert stats == results[0][1]


@pytest.mark.parametrize("aggregation", STREAMED)
def test_a_streamed_step_is_the_step_over_the_complete_batch(
    new_double_model: NewModel, aggregation: Aggregation
) -> None:
    complete, streamed = (learner(new_double_model(), aggregation) for _ in range(2))
    for seq in (1, 2, 3):
        sealed = random_batch(7, seq=seq)
        expected = complete.step(sealed.assembled())
        found = stream(streamed, sealed, (1, 2, 1))
        assert found.skipped is expected.skipped is None
        assert found.mismatches.keys() == expected.mismatches.keys()
        assert compared(found) == pytest.approx(compared(expected), rel=1e-9, abs=1e-12)
    assert distance(complete, learner(new_double_model(), aggregation)) > 1e-3, "they learned"
    assert distance(complete, streamed) < 1e-9


def test_in_float32_the_loss_curve_is_the_same_to_1e_6(new_model: NewModel) -> None:
    """Sums in another order are rounded differently; AdamW turns that into a small part of its
    learning rate."""
    rate = 2e-3
    complete, streamed = (learner(new_model(), Aggregation.FIXED_CONSTANT) for _ in range(2))
    for seq in range(1, 9):
        sealed = random_batch(7, seq=seq)
        loss = complete.step(sealed.assembled()).values["loss"]
        assert abs(stream(streamed, sealed, (1, 2, 1)).values["loss"] - loss) < 1e-6
    assert distance(complete, streamed) < 0.01 * rate


@pytest.mark.parametrize("expected", [4, 16, 64])
def test_another_number_of_sequences_than_expected_changes_the_scale_only(
    new_double_model: NewModel, expected: int
) -> None:
    """A row may have several samples, or be gone: the denominator is what came."""
    aggregation = Aggregation.SEQ_MEAN_TOKEN_MEAN
    complete, streamed = (learner(new_double_model(), aggregation) for _ in range(2))
    sealed = random_batch(9)
    loss = complete.step(sealed.assembled()).values["loss"]
    stats = stream(streamed, sealed, (2, 2), expected)
    assert stats.values["loss"] == pytest.approx(loss, rel=1e-12)
    assert distance(complete, streamed) < 1e-12


def test_token_mean_cannot_be_accumulated(new_model: NewModel) -> None:
    actor = learner(new_model(), Aggregation.TOKEN_MEAN)
    with pytest.raises(ValueError, match="complete update"):
        stream(actor, random_batch(1), (4,))


def test_a_batch_without_a_signal_is_skipped_and_leaves_no_gradient(new_model: NewModel) -> None:
    rows = [(make_turn([3, 4], [5]), 0.5), (make_turn([3, 4], [6]), 0.5)]
    actor = learner(new_model(), Aggregation.FIXED_CONSTANT)
    before = parameters(actor)
    stats = stream(actor, seal([rows, rows]), (1, 1))
    assert stats.skipped is SkipReason.ZERO_ADVANTAGE
    assert_same_bits(parameters(actor), before)
    assert all(p.grad is None for p in actor.model.parameters())
    assert stream(actor, seal([]), (0,)).skipped is SkipReason.NO_TOKENS


def test_a_discarded_step_leaves_nothing(new_model: NewModel) -> None:
    actor, other = (learner(new_model(), Aggregation.FIXED_CONSTANT) for _ in range(2))
    step = StreamedStep(actor, Pipeline(()), num_sequences=NUM_SEQUENCES)
    step.add(random_batch(4).cut((2, 2))[0].assembled())
    step.discard()
    for one in (actor, other):
        stream(one, random_batch(5), (2, 2))
    assert_same_bits(parameters(actor), parameters(other))


def test_a_row_whose_loss_is_not_finite_is_left_out_as_in_a_complete_batch(
    new_double_model: NewModel,
) -> None:
    def objective(tokens: Tokens) -> TokenLoss:
        factor_K = torch.where(tokens.sampling_K < -4, math.nan, 1.0)
        return TokenLoss(loss_K=-tokens.logprobs_K * factor_K, metrics={})

    bad = replace(make_turn([3, 4], [5, 5]), logprobs=log_probs([-5.0, -5.0]))
    good = [(make_turn([3, 4], [5, 7]), 0.0), (make_turn([3, 4], [6]), 1.0)]
    sealed = seal([good, [(bad, 0.0), (make_turn([3, 4], [6]), 1.0)]])
    weights = LossWeights(aggregation=Aggregation.SEQ_MEAN_TOKEN_SUM)
    complete, streamed = (
        make_learner(new_double_model(), objective=objective, bounds=(0.2, 0.2), weights=weights)
        for _ in range(2)
    )
    expected = complete.step(sealed.assembled())
    found = stream(streamed, sealed, (1, 1), expected=4)
    assert found.skipped is expected.skipped is None
    assert math.isfinite(expected.values["loss"])
    assert compared(found) == pytest.approx(compared(expected), rel=1e-12)
    assert max(gap.mean_abs for gap in found.mismatches.values()) > 5, "it counts against its node"
    assert distance(complete, streamed) < 1e-12


ALGORITHMS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {"aggregation": "seq-mean-token-mean", "beta": 0.01}),
    ("dr_grpo", {}),
    ("dapo", {"aggregation": "fixed-constant"}),
    ("gspo", {"correction": {"weighting": "none", "veto": 1e-4}}),
    ("rloo", {"aggregation": "seq-mean-token-sum"}),
    ("opd", {"aggregation": "fixed-constant"}),
]


@pytest.mark.parametrize(("name", "more"), ALGORITHMS)
def test_built_in_algorithms_stream(model_folder: Path, name: str, more: dict[str, Any]) -> None:
    """With their infer and compute stages."""

    def build(*, streams: bool) -> Models:
        config = settings(model_folder, name, more=more, minibatches=1, stream=streams)
        return build_models(config, POLICY, model_folder)

    complete, streamed = build(streams=False), build(streams=True)
    assert streamed.is_streamed and not complete.is_streamed
    for seq in (1, 2):
        sealed = random_batch(8, seq=seq)
        expected = complete.step(assembled(sealed))
        step = streamed.begin_step()
        for part in sealed.cut((1, 3)):
            step.add(assembled(part))
        found = step.finish()
        names = {key for key in expected.values if "seconds" not in key}
        assert names <= found.values.keys()
        assert found.values["loss"] == pytest.approx(expected.values["loss"], rel=1e-5, abs=1e-6)
    tensors = streamed.weights()
    for key, value in complete.weights().items():
        torch.testing.assert_close(tensors[key], value, rtol=0, atol=2e-5)  # 1 % of the rate


def test_a_complete_batch_has_the_bits_of_its_instalments(model_folder: Path) -> None:
    """As `replay` computes it again."""
    config = settings(model_folder, "dr_grpo", minibatches=1, stream=True)
    whole, parts = (build_models(config, POLICY, model_folder) for _ in range(2))
    sealed = random_batch(2)
    expected = whole.step(assembled(sealed))
    step = parts.begin_step()
    for part in sealed.cut((1, 1, 2, 0)):
        step.add(assembled(part))
    assert compared(step.finish()) == compared(expected)
    assert_same_bits(cast(Any, whole.weights()), cast(Any, parts.weights()))
