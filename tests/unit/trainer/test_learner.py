# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, Sealed, make_turn, random_batch, seal
from torch import Tensor
from transformers import PreTrainedModel

from penstock.errors import StoreError
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.inputs import make_inputs, micro_batches, plan_updates
from penstock.trainer.learner import Learner, SkipReason, UpdateSpec, clip, forward, sum_loss
from penstock.trainer.losses import LossSpec
from penstock.types import SamplingSpec, log_probs

LOSS = LossSpec(epsilon=0.2, epsilon_high=0.2, entropy_coef=0.01)
UPDATES = UpdateSpec(learning_rate=2e-3)
NewModel = Callable[[], PreTrainedModel]


def gradient(model: PreTrainedModel, batch: Batch, max_tokens: int) -> tuple[float, Tensor]:
    """Loss and gradient of the one update of a batch, in the model's precision."""
    model.zero_grad()
    (update,) = plan_updates(batch, minibatches=1)
    total = 0.0
    for inputs in micro_batches(update, batch, max_tokens):
        loss, _ = sum_loss(forward(model, inputs), inputs, LOSS)
        (loss / update.num_trained).backward()
        total += loss.item() / update.num_trained
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return total, torch.cat(grads)


def parameters(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.model.named_parameters()}


def assert_same_bits(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


def oracle_loss(model: PreTrainedModel, sealed: Sealed) -> float:
    """Token-mean loss row by row, without padding, in float64 NumPy over the model's logits."""
    batch = sealed.assembled()
    total, count = 0.0, 0
    samples = batch.samples
    for s, row in enumerate(samples.rows_S):
        part = slice(int(samples.starts_S[s]), int(samples.ends_S[s]))
        ids = samples.ids_T[part].astype(np.int64)
        with torch.no_grad():
            logits: npt.NDArray[np.float64] = (
                model(input_ids=torch.from_numpy(ids)[None]).logits[0].double().numpy()
            )
        for t in np.flatnonzero(samples.mask_T[part]):
            z = logits[t - 1] / samples.temperature_T[part][t]
            logp = z - z.max() - np.log(np.exp(z - z.max()).sum())
            ratio = np.exp(logp[ids[t]] - samples.logprobs_T[part][t])
            advantage = batch.advantages_R[row]
            surrogate = min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
            total += -surrogate + 0.01 * float((np.exp(logp) * logp).sum())
            count += 1
    return total / count


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_of_a_ragged_batch_against_the_oracle(
    new_double_model: NewModel, temperature: float
) -> None:
    model = new_double_model()
    sealed = random_batch(1, spec=SamplingSpec(temperature=temperature))
    loss, _ = gradient(model, sealed.assembled(), max_tokens=4096)
    assert loss == pytest.approx(oracle_loss(model, sealed), rel=1e-10)


def test_the_gradient_of_the_whole_update_by_central_differences(
    new_double_model: NewModel,
) -> None:
    model = new_double_model()
    batch = random_batch(2, num_groups=1, size=3).assembled()
    _, grads = gradient(model, batch, max_tokens=16)
    direction = grads / grads.norm()

    def moved(by: float) -> float:
        shifted = new_double_model()
        flat = torch.nn.utils.parameters_to_vector(shifted.parameters()) + by * direction
        torch.nn.utils.vector_to_parameters(flat, shifted.parameters())
        return gradient(shifted, batch, max_tokens=4096)[0]

    slope = (moved(1e-5) - moved(-1e-5)) / 2e-5
    assert slope == pytest.approx(float(grads.norm()), rel=1e-6)


def test_micro_batches_and_padding_do_not_change_the_gradient(new_double_model: NewModel) -> None:
    model = new_double_model()
    batch = random_batch(3).assembled()
    loss, grads = gradient(model, batch, max_tokens=4096)
    for max_tokens in (1, 17, 64):
        other_loss, other = gradient(model, batch, max_tokens)
        assert other_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(other, grads, rtol=1e-10, atol=1e-15)


def test_a_step_divides_by_the_tokens_of_its_whole_update(new_double_model: NewModel) -> None:
    batch = random_batch(3).assembled()
    whole = Learner(new_double_model(), LOSS, UPDATES).step(batch).values
    parts = Learner(new_double_model(), LOSS, replace(UPDATES, micro_batch_tokens=17)).step(batch)
    assert parts.values["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-10)
    assert parts.values["loss"] == pytest.approx(whole["loss"], rel=1e-10)


def test_the_order_of_rows_does_not_change_the_gradient(new_double_model: NewModel) -> None:
    model = new_double_model()
    prompt = [4, 5, 6, 3]
    rows = [(make_turn(prompt, [7, 8, 9][: i % 3 + 1]), float(i % 2)) for i in range(6)]
    _, grads = gradient(model, seal([rows]).assembled(), max_tokens=4096)
    _, other = gradient(model, seal([rows[::-1]]).assembled(), max_tokens=4096)
    torch.testing.assert_close(other, grads, rtol=1e-10, atol=1e-15)


def test_equal_inputs_are_computed_once(new_double_model: NewModel) -> None:
    answers = [[7, 8], [7, 9], [7, 8], [9, 8], [7]]
    rows = [(make_turn([4, 5, 3], answer), float(i % 2)) for i, answer in enumerate(answers)]
    sealed = seal([rows])
    inputs = make_inputs(sealed.assembled(), np.arange(5))
    assert inputs.ids_UL.tolist() == [[4, 5, 3, 0], [4, 5, 3, 7], [4, 5, 3, 9]]
    model = new_double_model()
    loss, _ = gradient(model, sealed.assembled(), max_tokens=4096)
    assert loss == pytest.approx(oracle_loss(model, sealed), rel=1e-10)


def test_no_micro_batch_exceeds_its_budget_but_for_one_long_sample() -> None:
    batch = random_batch(4, num_groups=8, size=8).assembled()
    (update,) = plan_updates(batch, 1)
    parts = list(micro_batches(update, batch, max_tokens=20))
    assert all(part.ids_UL.numel() <= 20 or part.ids_UL.shape[0] == 1 for part in parts)
    assert sum(part.targets_K.numel() for part in parts) == update.num_trained


def test_the_trainer_recomputes_what_the_engine_would_record(new_model: NewModel) -> None:
    model = new_model()
    batch = random_batch(5).assembled()
    inputs = make_inputs(batch, np.arange(batch.samples.starts_S.size))
    with torch.no_grad():
        got = forward(model, inputs).logprobs_K.numpy()
        k = 0
        for s in range(batch.samples.starts_S.size):
            start, end = int(batch.samples.starts_S[s]), int(batch.samples.ends_S[s])
            ids = torch.from_numpy(batch.samples.ids_T[start:end].astype(np.int64))
            full = torch.log_softmax(model(input_ids=ids[None]).logits[0], dim=-1)
            for t in np.flatnonzero(batch.samples.mask_T[start:end]):
                assert got[k] == pytest.approx(float(full[t - 1, ids[t]]), abs=1e-5)
                k += 1


def test_the_same_batch_twice_gives_the_same_bits(new_model: NewModel) -> None:
    left, right = (Learner(new_model(), LOSS, UPDATES) for _ in range(2))
    for seq in (1, 2):
        stats = [one.step(random_batch(6, seq=seq).assembled()) for one in (left, right)]
        assert stats[0].values["loss"] == stats[1].values["loss"]
    assert_same_bits(parameters(left), parameters(right))
    assert_same_bits(left.state_tensors(), right.state_tensors())


def test_minibatches_keep_groups_whole_and_in_order() -> None:
    batch = random_batch(7, num_groups=5, size=3).assembled()
    updates = plan_updates(batch, minibatches=3)
    rows = [batch.samples.rows_S[update.samples] for update in updates]
    assert [sorted(set(batch.groups_R[r].tolist())) for r in rows] == [[0, 1], [2, 3], [4]]
    assert sum(u.num_trained for u in updates) == batch.samples.num_trained


def test_minibatches_times_epochs_updates(new_model: NewModel) -> None:
    spec = replace(UPDATES, minibatches=2, epochs=3)
    learner = Learner(new_model(), LOSS, spec)
    stats = learner.step(random_batch(8).assembled())
    assert stats.skipped is None
    assert stats.values["updates"] == 6
    assert learner.state_tensors()["lm_head.weight.step"].item() == 6


def test_equal_rewards_are_skipped(new_model: NewModel) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    before = parameters(learner)
    sealed = seal([[(make_turn([3, 4], [5]), 0.5), (make_turn([3, 4], [6]), 0.5)]])
    assert learner.step(sealed.assembled()).skipped is SkipReason.ZERO_ADVANTAGE
    assert_same_bits(before, parameters(learner))


def test_a_batch_whose_rows_are_gone_is_skipped(new_model: NewModel) -> None:
    sealed = random_batch(9)
    gone = [replace(row, payload=None) for row in sealed.rows]
    batch = assemble(sealed.manifest, gone, POLICY, VOCAB_SIZE)
    assert Learner(new_model(), LOSS, UPDATES).step(batch).skipped is SkipReason.NO_TOKENS


def test_a_non_finite_gradient_changes_nothing(new_model: NewModel) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    learner.step(random_batch(10).assembled())
    before, state = parameters(learner), learner.state_tensors()
    state = {name: value.clone() for name, value in state.items()}
    turn = make_turn([3, 4], [5], sampling=SamplingSpec(temperature=1e-40))  # logits of infinity
    sealed = seal([[(turn, 0.0), (make_turn([3, 4], [6]), 1.0)]])
    stats = learner.step(sealed.assembled())
    assert stats.skipped is SkipReason.NON_FINITE
    assert stats.values["updates/non_finite"] == 1
    assert_same_bits(before, parameters(learner))
    assert_same_bits(state, learner.state_tensors())
    clean = Learner(new_model(), LOSS, UPDATES)
    clean.step(random_batch(10).assembled())
    for one in (learner, clean):
        one.step(random_batch(10, seq=2).assembled())
    assert_same_bits(parameters(clean), parameters(learner))


def test_one_absurd_record_does_not_cost_the_batch(new_model: NewModel) -> None:
    learner = Learner(new_model(), LOSS, UPDATES)
    before = parameters(learner)
    absurd = replace(make_turn([3, 4], [5, 5]), logprobs=log_probs([-3e38, -3e38]))
    stats = learner.step(seal([[(absurd, 0.0), (make_turn([3, 4], [6]), 1.0)]]).assembled())
    assert stats.skipped is None and stats.values["updates/non_finite"] == 0
    assert all(math.isfinite(value) for value in stats.values.values())
    assert any(not torch.equal(before[name], now) for name, now in parameters(learner).items())


def test_statistics(new_model: NewModel) -> None:
    batch = random_batch(11).assembled()
    values = Learner(new_model(), LOSS, UPDATES).step(batch).values
    assert values["reward/mean"] == pytest.approx(batch.rewards_R.mean())
    assert values["completions/mean_length"] == pytest.approx(batch.samples.num_trained / 16)
    assert values["entropy"] == pytest.approx(math.log(16), rel=0.05), "near uniform at the start"
    assert values["staleness/mean"] == 0
    assert values["mismatch"] > 0.05 and values["kl"] > 0
    assert values["clip_ratio"] == values["clip_ratio/low"] + values["clip_ratio/high"]
    assert values["grad_norm"] > 0
    assert all(math.isfinite(value) for value in values.values())


def test_mismatch_is_measured_before_the_weights_move(new_model: NewModel) -> None:
    batch = random_batch(14).assembled()
    once = Learner(new_model(), LOSS, UPDATES).step(batch).values
    often = Learner(new_model(), LOSS, replace(UPDATES, epochs=4)).step(batch).values
    assert often["mismatch"] == once["mismatch"]
    assert often["kl"] != once["kl"]
    stale = replace(batch, trains_from=batch.trains_from + 1)
    assert "mismatch" not in Learner(new_model(), LOSS, UPDATES).step(stale).values


def test_a_row_of_another_vocabulary_is_left_out_and_its_group_keeps_its_statistics() -> None:
    good = [(make_turn([3, 4], [5]), 1.0), (make_turn([3, 4], [6]), 0.0)]
    foreign = (make_turn([3, 4], [VOCAB_SIZE]), 0.0)
    batch = seal([[*good, foreign]]).assembled()
    assert batch.samples.rows_S.tolist() == [0, 1]
    assert batch.samples.num_trained == 2
    assert batch.advantages_R[0] == pytest.approx(2 / 3 / math.sqrt(1 / 3), rel=1e-4)


def test_rows_other_than_those_sealed_are_refused() -> None:
    sealed = random_batch(12)
    first, second, *rest = sealed.rows
    swapped = [replace(first, payload=second.payload), second, *rest]
    with pytest.raises(StoreError, match="as sealed"):
        assemble(sealed.manifest, swapped, POLICY, VOCAB_SIZE)
    with pytest.raises(StoreError, match="15 rows"):
        assemble(sealed.manifest, sealed.rows[1:], POLICY, VOCAB_SIZE)


def test_adamw_against_numpy(new_double_model: NewModel) -> None:
    """Ten updates with decoupled decay, bias correction and clipping, on one matrix."""
    name = "model.layers.0.mlp.up_proj.weight"
    spec = replace(UPDATES, weight_decay=0.1)
    learner = Learner(new_double_model(), LOSS, spec)
    value = parameters(learner)[name].numpy()
    mean, square = np.zeros_like(value), np.zeros_like(value)
    for step in range(1, 11):
        batch = random_batch(13, seq=step).assembled()
        _, grads = gradient(learner.model, batch, UPDATES.micro_batch_tokens)
        norm = float(grads.norm())
        parameter = dict(learner.model.named_parameters())[name]
        assert parameter.grad is not None
        grad = parameter.grad.numpy() * min(1.0, 1.0 / (norm + 1e-6))
        learner.model.zero_grad()
        learner.step(batch)
        mean, square = 0.9 * mean + 0.1 * grad, 0.999 * square + 0.001 * grad**2
        value = value * (1 - 2e-3 * 0.1)
        corrected = mean / (1 - 0.9**step)
        value -= 2e-3 * corrected / (np.sqrt(square / (1 - 0.999**step)) + 1e-8)
        np.testing.assert_allclose(parameters(learner)[name].numpy(), value, rtol=1e-9, atol=1e-14)


def test_clip_scales_to_the_norm_allowed() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    parameter.grad = torch.full((4,), 3.0, dtype=torch.float64)
    assert clip([parameter], 1.0) == pytest.approx(6.0)
    assert float(parameter.grad.norm()) == pytest.approx(1.0, rel=1e-6)
    assert clip([parameter], 10.0) == pytest.approx(1.0, rel=1e-6)
