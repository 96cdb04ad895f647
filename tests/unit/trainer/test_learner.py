# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.unit.trainer.doubles import (
    CLIPPED,
    POLICY,
    VOCAB_SIZE,
    Sealed,
    credited,
    make_learner,
    make_turn,
    random_batch,
    seal,
)
from torch import Tensor
from transformers import PreTrainedModel

from penstock.errors import ConfigError, StoreError
from penstock.trainer import actor as actor_module
from penstock.trainer.actor import Actor
from penstock.trainer.attention import AttentionLayout, make_attention_layout
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.inputs import PROXIMAL, make_inputs, split
from penstock.trainer.learner import Learner, Optimizer, SkipReason, Stats, weighted_sum
from penstock.trainer.losses.mismatch import CorrectedLoss, Correction, SequenceRatio, Weighting
from penstock.trainer.losses.tokens import TokenLoss, Tokens
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.ranks.sharding import clip
from penstock.trainer.schedules import Schedule
from penstock.trainer.signals.alarms import ALARM_AFTER
from penstock.trainer.signals.monitor import SignalMonitor
from penstock.trainer.updates import UpdateSpec, plan_updates
from penstock.types import SamplingSpec, log_probs

NewModel = Callable[[], PreTrainedModel]


def gradient(model: PreTrainedModel, batch: Batch, max_tokens: int) -> tuple[float, Tensor]:
    """Loss and gradient of the one update of a batch, in the model's precision."""
    model.zero_grad()
    actor = Actor(model, learns_entropy=True)
    (update,) = plan_updates(batch, UpdateSpec(), SingleRank())
    total = 0.0
    for chosen in split(update.samples, batch.samples, max_tokens):
        inputs = make_inputs(batch, chosen, update.weights_T)
        loss = weighted_sum(CLIPPED(actor(inputs)), inputs)
        loss.backward()
        total += loss.item()
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
    model.set_attn_implementation("sdpa")
    batch = sealed.assembled()
    total, count = 0.0, 0
    samples = batch.samples
    for s in range(samples.rows_S.size):
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
            advantage = batch.token_columns["advantage"][part][t]
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
    whole = make_learner(new_double_model()).step(batch).values
    parts = make_learner(new_double_model(), micro_batch_tokens=17).step(batch)
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
    assert inputs.ids_P.tolist() == [4, 5, 3, 7, 4, 5, 3, 9, 4, 5, 3]
    model = new_double_model()
    loss, _ = gradient(model, sealed.assembled(), max_tokens=4096)
    assert loss == pytest.approx(oracle_loss(model, sealed), rel=1e-10)


def test_no_micro_batch_exceeds_its_budget_but_for_one_long_sample() -> None:
    batch = random_batch(4, num_groups=8, size=8).assembled()
    every = np.arange(batch.samples.starts_S.size)
    parts = [make_inputs(batch, chosen) for chosen in split(every, batch.samples, max_tokens=20)]
    assert all(
        part.ids_P.numel() <= 20 or cast(AttentionLayout, part.rows).buckets[0].shape[1] > 20
        for part in parts
    )
    assert sum(part.targets_K.numel() for part in parts) == batch.samples.num_trained


def test_nothing_leaks_from_one_packed_sample_to_another(new_double_model: NewModel) -> None:
    """Whatever a neighbour says, a sample's log-probs and gradients keep their bits."""
    actor = Actor(new_double_model())

    def scored(neighbour: list[int]) -> tuple[Tensor, Tensor]:
        ours = make_turn([4, 5, 6, 3], [7, 8, 9])
        batch = seal([[(make_turn([3], neighbour), 0.0), (ours, 1.0)]]).assembled()
        inputs = make_inputs(batch, np.arange(2))
        embedded = actor.model.get_input_embeddings()(inputs.ids_P)
        line = embedded.detach().requires_grad_()
        hidden = actor.model.get_decoder()(
            inputs_embeds=line[None], position_ids=inputs.positions_P[None], rows=inputs.rows
        ).last_hidden_state[0]
        own = inputs.sequences_K == 1
        hidden[inputs.predictor_K[own]].sum().backward()
        assert line.grad is not None
        return actor(inputs).logprobs_K[own], line.grad.norm(dim=1)

    logprobs, reach = scored([5] * 30)
    other, _ = scored([6, 7, 8] * 10)
    assert torch.equal(logprobs, other)
    assert reach[:30].max() == 0 and reach[30:36].min() > 0


def test_the_line_holds_no_padding_and_attention_little() -> None:
    lengths = np.exp(np.random.default_rng(0).normal(5.0, 1.0, 200)).astype(np.int64) + 1
    rows = make_attention_layout(lengths)
    cells = sum(run.numel() for run in rows.buckets)
    assert rows.unbucket_P.numel() == lengths.sum()
    assert cells < lengths.sum() * 1.2
    line = torch.cat([run.flatten() for run in rows.buckets])
    assert torch.equal(line[rows.unbucket_P], torch.arange(int(lengths.sum())))


def test_many_logits_are_made_in_parts(
    new_double_model: NewModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_batch(15, spec=SamplingSpec(temperature=0.7, top_k=9)).assembled()
    loss, grads = gradient(new_double_model(), batch, max_tokens=4096)
    monkeypatch.setattr(actor_module, "MAX_LOGITS", 3 * VOCAB_SIZE)
    again, other = gradient(new_double_model(), batch, max_tokens=4096)
    assert again == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(other, grads, rtol=1e-10, atol=1e-15)


def test_the_trainer_recomputes_what_the_engine_would_record(new_model: NewModel) -> None:
    model = new_model()
    batch = random_batch(5).assembled()
    inputs = make_inputs(batch, np.arange(batch.samples.starts_S.size))
    with torch.no_grad():
        got = Actor(model)(inputs).logprobs_K.numpy()
        model.set_attn_implementation("sdpa")
        k = 0
        for s in range(batch.samples.starts_S.size):
            start, end = int(batch.samples.starts_S[s]), int(batch.samples.ends_S[s])
            ids = torch.from_numpy(batch.samples.ids_T[start:end].astype(np.int64))
            full = torch.log_softmax(model(input_ids=ids[None]).logits[0], dim=-1)
            for t in np.flatnonzero(batch.samples.mask_T[start:end]):
                assert got[k] == pytest.approx(float(full[t - 1, ids[t]]), abs=1e-5)
                k += 1


def test_the_same_batch_twice_gives_the_same_bits(new_model: NewModel) -> None:
    left, right = (make_learner(new_model()) for _ in range(2))
    for seq in (1, 2):
        stats = [one.step(random_batch(6, seq=seq).assembled()) for one in (left, right)]
        assert stats[0].values["loss"] == stats[1].values["loss"]
    assert_same_bits(parameters(left), parameters(right))
    assert_same_bits(left.state_tensors(), right.state_tensors())


def test_minibatches_keep_groups_whole_and_in_order() -> None:
    batch = random_batch(7, num_groups=5, size=3).assembled()
    updates = plan_updates(batch, UpdateSpec(minibatches=3), SingleRank())
    rows = [batch.samples.rows_S[update.samples] for update in updates]
    assert [sorted(set(batch.groups_R[r].tolist())) for r in rows] == [[0, 1], [2, 3], [4]]
    weights = [update.weights_T[update.weights_T > 0] for update in updates]
    assert sum(one.size for one in weights) == batch.samples.num_trained
    assert all(one.sum() == pytest.approx(1) for one in weights)


def test_minibatches_times_epochs_updates(new_model: NewModel) -> None:
    learner = make_learner(new_model(), minibatches=2, epochs=3)
    stats = learner.step(random_batch(8).assembled())
    assert stats.skipped is None
    assert stats.values["updates"] == 6
    assert learner.state_tensors()["model.lm_head.weight.step"].item() == 6


def test_equal_rewards_are_skipped(new_model: NewModel) -> None:
    learner = make_learner(new_model())
    before = parameters(learner)
    sealed = seal([[(make_turn([3, 4], [5]), 0.5), (make_turn([3, 4], [6]), 0.5)]])
    assert learner.step(sealed.assembled()).skipped is SkipReason.ZERO_ADVANTAGE
    assert_same_bits(before, parameters(learner))


def test_a_batch_whose_every_token_is_rejected_says_so(new_model: NewModel) -> None:
    correction = Correction(
        weighting=Weighting.NONE, sequence=SequenceRatio.SUM, sequence_low=0.5, sequence_high=2.0
    )
    learner = Learner(
        Actor(new_model()),
        CorrectedLoss(inner=CLIPPED, correction=correction),
        Optimizer(schedule=Schedule(peak=1e-3)),
        update_spec=UpdateSpec(correction=correction),
        forward_pass=ForwardPass(ranks=SingleRank(), micro_batch_tokens=4096),
        bounds=(0.2, 0.2),
    )
    before = parameters(learner)

    def stats_of(*rewards: float) -> Stats:
        turns = [make_turn([3, 4], [token], logprobs=[-30.0]) for token in (5, 6)]
        batch = seal([list(zip(turns, rewards, strict=True))]).assembled()
        return learner.step(batch.with_columns(token_columns={PROXIMAL: learner.infer(batch)}))

    alarms = list[str]()
    watch = SignalMonitor(lambda node: None)
    for seq in range(1, ALARM_AFTER + 1):
        stats = stats_of(0.0, 1.0)
        assert stats.skipped is SkipReason.REJECTED
        alarms.extend(watch.observe(seq, stats))
    (alarm,) = alarms
    assert "3 rejected" in alarm and "the correction's bounds" in alarm
    assert stats_of(0.5, 0.5).skipped is SkipReason.ZERO_ADVANTAGE
    assert_same_bits(before, parameters(learner))


def test_a_batch_whose_rows_are_gone_is_skipped(new_model: NewModel) -> None:
    sealed = random_batch(9)
    gone = [replace(row, payload=None) for row in sealed.rows]
    batch = credited(assemble(sealed.manifest, gone, POLICY, VOCAB_SIZE))
    assert make_learner(new_model()).step(batch).skipped is SkipReason.NO_TOKENS


def test_a_non_finite_gradient_changes_nothing(new_model: NewModel) -> None:
    is_broken = False

    def objective(tokens: Tokens) -> TokenLoss:
        loss_K = -tokens.logprobs_K * (math.nan if is_broken else 1.0)
        return TokenLoss(loss_K=loss_K, metrics={})

    learner = make_learner(new_model(), objective=objective)
    learner.step(random_batch(10).assembled())
    before, state = parameters(learner), learner.state_tensors()
    state = {name: value.clone() for name, value in state.items()}
    sealed = seal([[(make_turn([3, 4], [5]), 0.0), (make_turn([3, 4], [6]), 1.0)]])
    is_broken = True  # every row: no node is to blame
    stats = learner.step(sealed.assembled())
    is_broken = False
    assert stats.skipped is SkipReason.NON_FINITE
    assert stats.values["updates/non_finite"] == 1
    assert_same_bits(before, parameters(learner))
    assert_same_bits(state, learner.state_tensors())
    clean = make_learner(new_model(), objective=objective)
    clean.step(random_batch(10).assembled())
    for one in (learner, clean):
        one.step(random_batch(10, seq=2).assembled())
    assert_same_bits(parameters(clean), parameters(learner))


def test_a_row_with_a_non_finite_loss_is_left_out_and_blamed(new_model: NewModel) -> None:
    """The others are trained as if it had never been; its tokens count against its node."""

    def objective(tokens: Tokens) -> TokenLoss:
        factor_K = torch.where(tokens.sampling_K < -4, math.nan, 1.0)
        return TokenLoss(loss_K=-tokens.logprobs_K * factor_K, metrics={})

    learner = make_learner(new_model(), objective=objective, bounds=(0.2, 0.2))
    before = parameters(learner)
    bad = replace(make_turn([3, 4], [5, 5]), logprobs=log_probs([-5.0, -5.0]))
    batch = seal([[(bad, 0.0), (make_turn([3, 4], [6]), 1.0)]]).assembled()
    batch = replace(batch, subjects={0: "hostile", 1: "honest"})
    stats = learner.step(batch)
    assert stats.skipped is None and stats.values["updates/non_finite"] == 0
    assert any(not torch.equal(before[name], now) for name, now in parameters(learner).items())
    gaps = {subject: gap.mean_abs for (subject, _), gap in stats.mismatches.items()}
    assert gaps["hostile"] > 10 > gaps["honest"]


def test_a_row_at_a_temperature_near_zero_is_left_out(new_model: NewModel) -> None:
    """It would make every gradient infinite; the other row is trained."""
    bad = make_turn([3, 4], [5], sampling=SamplingSpec(temperature=1e-30))
    batch = seal([[(bad, 0.0), (make_turn([3, 4], [6]), 1.0)]]).assembled()
    stats = make_learner(new_model()).step(batch)
    assert stats.skipped is None and stats.values["updates/non_finite"] == 0
    assert stats.values["tokens/trained"] == 1


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (lambda loss_K: TokenLoss(loss_K=loss_K.mean(), metrics={}), r"loss_K of shape \(\) inst"),
        (lambda loss_K: TokenLoss(loss_K=loss_K[None], metrics={}), r"loss_K of shape \(1, \d+\)"),
        (lambda loss_K: TokenLoss(loss_K=loss_K, metrics={"x": loss_K.sum()}), r"x of shape \(\)"),
        (lambda loss_K: loss_K, "returned a Tensor; return TokenLoss"),
    ],
)  # fmt: skip
def test_a_loss_is_one_number_per_token(
    new_model: NewModel, give: Callable[[Tensor], TokenLoss], says: str
) -> None:
    """Before anything learns from it."""
    learner = make_learner(new_model(), objective=lambda tokens: give(-tokens.logprobs_K))
    with pytest.raises(ConfigError, match=says):
        learner.step(random_batch(1).assembled())
    assert all(parameter.grad is None for parameter in learner.model.parameters())


def test_one_absurd_record_does_not_cost_the_batch(new_model: NewModel) -> None:
    learner = make_learner(new_model())
    before = parameters(learner)
    absurd = replace(make_turn([3, 4], [5, 5]), logprobs=log_probs([-3e38, -3e38]))
    stats = learner.step(seal([[(absurd, 0.0), (make_turn([3, 4], [6]), 1.0)]]).assembled())
    assert stats.skipped is None and stats.values["updates/non_finite"] == 0
    assert all(math.isfinite(value) for value in stats.values.values())
    assert any(not torch.equal(before[name], now) for name, now in parameters(learner).items())


def test_statistics(new_model: NewModel) -> None:
    batch = random_batch(11).assembled()
    values = make_learner(new_model()).step(batch).values
    assert values["reward/mean"] == pytest.approx(batch.row_columns["reward"].mean())
    assert values["completions/mean_length"] == pytest.approx(batch.samples.num_trained / 16)
    assert values["entropy"] == pytest.approx(math.log(16), rel=0.05), "near uniform at the start"
    assert values["staleness/mean"] == 0
    assert values["mismatch"] > 0.05 and values["kl"] > 0
    assert values["clip_ratio"] == values["clip_ratio/low"] + values["clip_ratio/high"]
    assert values["grad_norm"] > 0
    assert all(math.isfinite(value) for value in values.values())


def test_memory_is_that_of_the_rank_with_the_most(new_model: NewModel) -> None:
    class BackgroundWorker(SingleRank):
        """A rank whose neighbour holds a terabyte."""

        def max_over_ranks(self, number: int) -> int:
            return max(number, 1 << 20) if number > 100 else number

    batch = random_batch(11).assembled()
    alone = make_learner(new_model()).step(batch).values["memory/peak_mb"]
    assert 100 < alone < 1 << 20
    assert (
        make_learner(new_model(), ranks=BackgroundWorker()).step(batch).values["memory/peak_mb"]
        == 1 << 20
    )


def test_mismatch_is_measured_before_the_weights_move(new_model: NewModel) -> None:
    batch = random_batch(14).assembled()
    once = make_learner(new_model()).step(batch).values
    often = make_learner(new_model(), epochs=4).step(batch).values
    assert often["mismatch"] == once["mismatch"]
    assert often["kl"] != once["kl"]
    stale = replace(batch, trains_from=batch.trains_from + 1)
    assert "mismatch" not in make_learner(new_model()).step(stale).values


def test_a_row_of_another_vocabulary_is_left_out_and_its_group_keeps_its_statistics() -> None:
    good = [(make_turn([3, 4], [5]), 1.0), (make_turn([3, 4], [6]), 0.0)]
    foreign = (make_turn([3, 4], [VOCAB_SIZE]), 0.0)
    batch = seal([[*good, foreign]]).assembled()
    assert batch.samples.rows_S.tolist() == [0, 1]
    assert batch.samples.num_trained == 2
    first = batch.token_columns["advantage"][batch.samples.mask_T][0]
    assert first == pytest.approx(2 / 3 / math.sqrt(1 / 3), rel=1e-4)


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
    learner = make_learner(new_double_model(), weight_decay=0.1)
    value = parameters(learner)[name].numpy()
    mean, square = np.zeros_like(value), np.zeros_like(value)
    for step in range(1, 11):
        batch = random_batch(13, seq=step).assembled()
        _, grads = gradient(learner.model, batch, 4096)
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
