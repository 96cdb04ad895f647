# SPDX-License-Identifier: Apache-2.0
"""Every algorithm as its run file gives it: built, trained for some steps, saved and gone on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.doubles import (
    POLICY,
    VOCAB_SIZE,
    credited,
    make_learner,
    make_turn,
    random_batch,
    seal,
    settings,
)
from tests.unit.trainer.test_packing_check import make_tiny

from penstock.config.algorithms import builtin_algorithms
from penstock.config.pipeline import PipelineConfig
from penstock.errors import ConfigError
from penstock.trainer.advantages.gae import ValueLoss
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.build import build_models
from penstock.trainer.build_objective import objective_of
from penstock.trainer.learner import SkipReason
from penstock.trainer.losses.aggregation import Aggregation
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.tokens import TokenLoss, Tokens
from penstock.trainer.model_folders import load_model
from penstock.trainer.models import Models
from penstock.trainer.pipeline.builtin import pipeline_of
from penstock.trainer.pipeline.layout import RowColumn
from penstock.trainer.signals.alarms import EXCLUDED
from penstock.trainer.snapshots import weights_of
from penstock.types import FinishReason


def batch(seq: int) -> Batch:
    sealed = random_batch(1, seq=seq)
    return assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)


def train(models: Models, *seqs: int) -> list[dict[str, float]]:
    stats = [models.step(batch(seq)) for seq in seqs]
    assert all(one.skipped is None for one in stats)
    return [dict(one.values) for one in stats]


@pytest.mark.parametrize("name", builtin_algorithms())
def test_an_algorithm_goes_on_bit_for_bit(model_folder: Path, tmp_path: Path, name: str) -> None:
    chosen = settings(model_folder, name)
    whole = build_models(chosen, POLICY, model_folder)
    metrics = train(whole, 1, 2, 3)
    first = build_models(chosen, POLICY, model_folder)
    train(first, 1, 2)
    state = {key: value.clone() for key, value in first.state_tensors().items()}
    first.model.save_pretrained(tmp_path / "saved")
    second = build_models(chosen, POLICY, tmp_path / "saved")
    second.restore(state)
    [again] = train(second, 3)
    kept = {key for key in again if "seconds" not in key and "memory" not in key}
    assert {key: again[key] for key in kept} == {key: metrics[-1][key] for key in kept}
    for key, value in weights_of(whole.model).items():
        assert torch.equal(value, weights_of(second.model)[key]), key


def test_a_new_critic_values_nothing_and_learns(model_folder: Path) -> None:
    models = build_models(settings(model_folder, "ppo", minibatches=1), POLICY, model_folder)
    first, *_, last = [train(models, 1)[0] for _ in range(12)]
    assert first["critic/value"] == 0
    assert last["critic/value/error"] < first["critic/value/error"]


def test_the_reference_stays_where_the_policy_began(model_folder: Path) -> None:
    models = build_models(settings(model_folder, "rloo", minibatches=1), POLICY, model_folder)
    first, second = train(models, 1, 2)
    assert first["reference_kl"] == pytest.approx(0, abs=1e-3)
    assert second["reference_kl"] > 0


def test_dapo_is_built_with_all_its_parts(model_folder: Path) -> None:
    config = settings(model_folder, "dapo")
    [own] = [config.for_policy(name) for name in config.models]
    assert objective_of(own.algorithm) == ClippedLoss(epsilon=0.2, epsilon_high=0.28), "and no KL"
    assert Aggregation(own.algorithm.aggregation) is Aggregation.TOKEN_MEAN
    overlong, advantage, learn = pipeline_of(config, POLICY)
    assert (overlong.role, overlong.options["how"]) == ("overlong", "both"), "masked and punished"
    assert advantage.rename == {"shaped_reward": "reward"} and "excluded" in learn.reads
    admit = [rule.name for rule in own.rules if rule.hook == "admit"]
    assert admit == ["reward-spread"], "dynamic sampling, online"
    [values] = train(build_models(config, POLICY, model_folder), 1)
    assert values["updates"] == 4 and "reference_kl" not in values


def test_a_ratio_against_the_start_of_the_step_is_1_in_its_first_update(model_folder: Path) -> None:
    """The random batch was sampled by nobody, so against its log-probs much is clipped."""

    def first(against: str) -> dict[str, float]:
        config = settings(model_folder, "grpo", more={"ratio_against": against}, minibatches=1)
        return train(build_models(config, POLICY, model_folder), 1)[0]

    assert first("sampling")["clip_ratio"] > 0
    assert first("proximal")["clip_ratio"] == 0


def test_tokens_that_the_correction_rejects_leave_the_denominator(model_folder: Path) -> None:
    """IcePop as a run file asks for it, against the same sum computed by hand."""
    correction = {"weighting": "mask", "low": 0.5, "high": 2.0}
    more = {"ratio_against": "proximal", "correction": correction}
    config = settings(model_folder, "grpo", more=more, minibatches=1)
    models = build_models(config, POLICY, model_folder)
    given = batch(1)
    proximal_T = make_learner(load_model(model_folder)).infer(given)
    advantage_T = credited(given).token_columns["advantage"]
    mask_T = given.samples.mask_T
    rho_K = np.exp(proximal_T - given.samples.logprobs_T)[mask_T]
    is_kept_K = (rho_K >= 0.5) & (rho_K <= 2.0)
    assert 0.5 < is_kept_K.mean() < 1, "some are rejected, and not most"
    values = models.step(given).values
    expected = -(rho_K * advantage_T[mask_T])[is_kept_K].sum() / is_kept_K.sum()
    assert values["loss"] == pytest.approx(expected, rel=1e-5)
    assert values["mismatch/rejected"] == pytest.approx(1 - is_kept_K.mean())


def test_a_model_that_cannot_be_packed_is_refused_before_it_trains(tmp_path: Path) -> None:
    make_tiny("granite", {"logits_scaling": 8.0}).save_pretrained(tmp_path / "granite")
    config = settings(tmp_path / "granite", "grpo")
    with pytest.raises(ConfigError, match="GraniteForCausalLM cannot be trained packed"):
        build_models(config, POLICY, tmp_path / "granite")


def far_sampled(seq: int) -> Batch:
    """One group, each token beyond the bounds on the side on which a clip leaves no gradient."""
    better = make_turn([3, 4], [5, 6], logprobs=[-9.0] * 2)
    worse = make_turn([3, 4], [6, 7], logprobs=[-0.1] * 2)
    sealed = seal([[(better, 1.0), (worse, 0.0)]], seq=seq)
    return assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("decoupled", {}),
        ("sapo", {}),
        ("cispo", {}),
        ("grpo", {"ratio_against": "proximal"}),
        ("grpo", {}),
    ],
)
def test_only_where_the_clip_stops_learning_is_a_batch_said_to_teach_nothing(
    model_folder: Path, name: str, more: dict[str, Any]
) -> None:
    config = settings(model_folder, name, groups_per_batch=1, minibatches=1, more=more)
    stats = build_models(config, POLICY, model_folder).step(far_sampled(1))
    is_stopped = name == "grpo" and not more
    assert (stats.values["grad_norm"] < 0.05) is is_stopped, "but for the reference's pull"
    assert stats.values["signal/clipped"] == float(is_stopped)


def test_rows_set_aside_are_told(model_folder: Path) -> None:
    turns = [make_turn([3, 4], [token], finish=FinishReason.LENGTH) for token in (5, 6)]
    sealed = seal([[(turns[0], 1.0), (turns[1], 0.0)]])
    given = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    config = settings(model_folder, "dapo", groups_per_batch=1)
    stats = build_models(config, POLICY, model_folder).step(given)
    assert stats.skipped is SkipReason.NO_TOKENS and stats.values[EXCLUDED] == 2


@pytest.mark.parametrize("name", ["grpo", "rloo", "ppo", "decoupled"])
def test_a_row_without_a_prompt_is_trained_with_the_others(model_folder: Path, name: str) -> None:
    """Its only token is predicted from nothing, so it has no input."""
    sealed = seal([[(make_turn([3, 4, 5], [6, 7]), 1.0), (make_turn([], [6]), 0.0)]])
    given = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    config = settings(model_folder, name, groups_per_batch=1, minibatches=1)
    values = build_models(config, POLICY, model_folder).step(given).values
    assert values["tokens/trained"] == 2


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_critic_sees_returns_as_they_are(
    model_folder: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def spy(self: ValueLoss, tokens: Tokens) -> TokenLoss:
        assert tokens.extra_columns is not None
        seen.extend(tokens.extra_columns["returns"].tolist())
        return compute(self, tokens)

    compute = ValueLoss.__call__
    monkeypatch.setattr(ValueLoss, "__call__", spy)
    sealed = seal([[(make_turn([3, 4], [5]), 100.3), (make_turn([3, 4], [6]), 101.1)]])
    given = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    options: dict[str, Any] = {"precision": precision, "minibatches": 1, "groups_per_batch": 1}
    stats = build_models(settings(model_folder, "ppo", **options), POLICY, model_folder).step(given)
    assert sorted(seen) == pytest.approx([100.3, 101.1], rel=1e-6)
    assert "critic/kl" not in stats.values, "a critic has no log-probs"


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_batch_of_which_nothing_is_left_is_skipped(model_folder: Path, name: str) -> None:
    models = build_models(settings(model_folder, name), POLICY, model_folder)
    empty = seal([], seq=1)
    stats = models.step(assemble(empty.manifest, empty.rows, POLICY, VOCAB_SIZE))
    assert stats.skipped is SkipReason.NO_TOKENS and stats.values["seconds/train"] == 0
    for key, value in weights_of(load_model(model_folder)).items():
        assert torch.equal(value, weights_of(models.model)[key]), key


def only_half(tokens: Tokens, *, factor: float) -> TokenLoss:
    """A user's own loss."""
    return TokenLoss(
        loss_K=-factor * tokens.logprobs_K * tokens.advantages_K,
        metrics={"half/factor": torch.full_like(tokens.logprobs_K, factor).detach()},
    )


def doubled(layout: Any, *, reward: np.ndarray[Any, Any]) -> dict[str, RowColumn]:
    return {"doubled_reward": RowColumn(2 * reward)}


def test_a_users_graph_with_its_own_reward_and_loss(model_folder: Path) -> None:
    module = "tests.unit.trainer.test_build"
    stages: list[dict[str, Any]] = [
        {"id": "shape", "type": "compute", "role": "shape", "fn": f"{module}:doubled"},
        {"id": "credit", "type": "compute", "role": "advantage"},
        {"id": "learn", "type": "train", "role": "actor", "fn": f"{module}:only_half"},
    ]
    stages[0] |= {"reads": ["reward"], "writes": ["doubled_reward"]}
    stages[1] |= {"reads": ["doubled_reward"], "writes": ["advantage"]}
    stages[1] |= {"rename": {"doubled_reward": "reward"}}
    stages[2] |= {"reads": ["turns", "advantage"], "options": {"factor": 0.5}}
    chosen = settings(model_folder, "grpo", pipeline={"stages": stages})
    [values] = train(build_models(chosen, POLICY, model_folder), 1)
    assert values["half/factor"] == 0.5
    assert {"seconds/stage/shape", "seconds/stage/credit", "seconds/stage/learn"} <= values.keys()


def test_a_critic_may_learn_before_there_is_credit(model_folder: Path) -> None:
    own = "tests.unit.trainer.own_stages"
    stages: list[dict[str, Any]] = [
        {"id": "values", "type": "infer", "role": "critic", "writes": ["values"]},
        {"id": "returns", "type": "compute", "role": "own", "fn": f"{own}:returns"},
        {
            "id": "critic",
            "type": "train",
            "role": "critic",
            "reads": ["turns", "values", "returns"],
        },
        {"id": "credit", "type": "compute", "role": "advantage", "writes": ["advantage"]},
        {"id": "learn", "type": "train", "role": "actor", "reads": ["turns", "advantage"]},
    ]
    stages[0] |= {"reads": ["turns"]}
    stages[1] |= {"reads": ["reward"], "writes": ["returns"]}
    stages[2] |= {"reads": ["turns", "values", "returns"]}
    stages[3] |= {"reads": ["reward"]}
    chosen = settings(model_folder, "grpo", pipeline={"stages": stages})
    [values] = train(build_models(chosen, POLICY, model_folder), 1)
    assert values["critic/updates"] == values["updates"] == 1


def test_no_frozen_model_stands_in_for_a_critic_that_nobody_trains(model_folder: Path) -> None:
    """Its log-probs would pass for values; the config refuses such a file already."""
    config = settings(model_folder, "ppo")
    stages = [stage for stage in pipeline_of(config, POLICY) if stage.id != "train_critic"]
    lacking = config.model_copy(update={"pipeline": PipelineConfig(stages=tuple(stages))})
    with pytest.raises(ConfigError, match=r"stage values needs the critic, .* trains only actor"):
        build_models(lacking, POLICY, model_folder)


@pytest.mark.parametrize("size", [8, 32])
def test_a_teacher_with_another_vocabulary_is_refused(
    model_folder: Path, tmp_path: Path, size: int
) -> None:
    """A smaller one has no such tokens; in a larger one they are others."""
    make_tiny("qwen3", {"vocab_size": size}).save_pretrained(tmp_path / "teacher")
    more = {"teacher": str(tmp_path / "teacher")}
    config = settings(model_folder, "opd", more=more)
    with pytest.raises(ConfigError, match=rf"stage teacher: .*teacher has .* of {size} .* of 16"):
        build_models(config, POLICY, model_folder)


def test_a_teacher_that_is_only_padded_further_is_asked(model_folder: Path, tmp_path: Path) -> None:
    """As larger members of a family are: more rows of embeddings, the same tokenizer."""
    make_tiny("qwen3", {"vocab_size": 32}).save_pretrained(tmp_path / "teacher")
    shutil.copy(model_folder / "tokenizer.json", tmp_path / "teacher")
    config = settings(model_folder, "opd", more={"teacher": str(tmp_path / "teacher")})
    assert train(build_models(config, POLICY, model_folder), 1)


def test_a_step_reports_each_of_its_micro_batches(model_folder: Path) -> None:
    done: list[int] = []
    config = settings(model_folder, "grpo", minibatches=2)
    models = build_models(config, POLICY, model_folder, on_micro_batch=lambda: done.append(1))
    train(models, 1)
    assert len(done) >= 2
