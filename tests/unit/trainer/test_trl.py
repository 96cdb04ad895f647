# SPDX-License-Identifier: Apache-2.0
"""What GRPO learns from a batch, against TRL: the gradient of a batch, and ten updates in a row.

`recorded/trl.safetensors` holds what TRL computed, in its own environment; to record it again, run
`benchmarks/trl_gradient.py` with the interpreter of `benchmarks.trl`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, Sealed, make_turn, seal
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.actor import Actor
from penstock.trainer.advantages.baselines import EPSILON, group_advantages
from penstock.trainer.arrays import Floats
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.inputs import make_inputs, split
from penstock.trainer.learner import Learner, Optimizer, weighted_sum
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.divergence import EntropyBonus
from penstock.trainer.model_folders import WEIGHTS, load_model
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.schedules import Schedule
from penstock.trainer.updates import UpdateSpec, plan_updates

RECORDED = Path(__file__).parent / "recorded" / "trl.safetensors"
GROUP_SIZE = 8
THEIR_EPSILON = 1e-4
"""TRL's, below the deviation of a group's rewards; ours is 1e-5."""

NewModel = Callable[[], PreTrainedModel]


class Recorded:
    def __init__(self) -> None:
        with safe_open(RECORDED, "pt") as file:
            about = json.loads(file.metadata()["about"])
        self._tensors: dict[str, Tensor] = load_file(RECORDED)
        self.model: dict[str, Any] = about["model"]
        self.settings: dict[str, float] = about["settings"]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def part(self, name: str) -> dict[str, Tensor]:
        """The parameters stored under this name."""
        prefix = f"{name}/"
        return {k.removeprefix(prefix): v for k, v in self._tensors.items() if k.startswith(prefix)}

    @property
    def objective(self) -> EntropyBonus:
        epsilon, delta = self.settings["epsilon"], self.settings["delta"]
        inner = ClippedLoss(epsilon=epsilon, epsilon_high=epsilon, delta=delta)
        return EntropyBonus(inner=inner, coef=self.settings["entropy_coef"])

    def sealed(self, step: int, logprobs_RG: Tensor) -> Sealed:
        """A batch of our own with the rows of theirs, without their padding."""
        groups = [
            [self._row(row, step, logprobs_RG) for row in range(start, start + GROUP_SIZE)]
            for start in range(0, len(self["answers"]), GROUP_SIZE)
        ]
        return seal(groups, seq=step + 1, trains_from=step)

    def _row(self, row: int, step: int, logprobs_RG: Tensor) -> tuple[Any, float]:
        is_prompt, is_answer = self["prompt_mask"][row].bool(), self["answer_mask"][row].bool()
        turn = make_turn(
            self["prompts"][row][is_prompt].tolist(),
            self["answers"][row][is_answer].tolist(),
            logprobs=logprobs_RG[row][is_answer].tolist(),
        )
        return turn, float(self["rewards"][step, row])


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def new_small_model(recorded: Recorded, tmp_path: Path) -> NewModel:
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **recorded.model}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(recorded.part("before"), tmp_path / WEIGHTS, metadata={"format": "pt"})
    return lambda: load_model(tmp_path)


def advantages(rewards_R: Floats, epsilon: float = EPSILON) -> Floats:
    return group_advantages(rewards_R, np.arange(rewards_R.size) // GROUP_SIZE, epsilon=epsilon)


def assembled(sealed: Sealed) -> Batch:
    """Credited with TRL's epsilon."""
    batch = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    advantages_R = advantages(batch.row_columns["reward"], epsilon=THEIR_EPSILON)
    return batch.with_columns(token_columns={"advantage": advantages_R[batch.rows_T]})


def gradient(model: PreTrainedModel, objective: EntropyBonus, batch: Batch) -> dict[str, Tensor]:
    """Of the one update of a batch, in several micro-batches."""
    actor = Actor(model, learns_entropy=True)
    (update,) = plan_updates(batch, UpdateSpec(), SingleRank())
    for chosen in split(update.samples, batch.samples, 200):
        inputs = make_inputs(batch, chosen, update.weights_T)
        weighted_sum(objective(actor(inputs)), inputs).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].detach().double().flatten() for name in sorted(tensors)])


def relative(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return float((flat(ours) - flat(theirs)).norm() / flat(theirs).norm())


@pytest.mark.parametrize(("kind", "old"), [("on", "logprobs"), ("off", "old_logprobs")])
def test_the_gradient_of_a_batch_is_that_of_trl(
    recorded: Recorded, new_small_model: NewModel, kind: str, old: str
) -> None:
    """On-policy, and with log-probs that make both clips and the dual clip bite."""
    logprobs_RG = recorded[old] if kind == "on" else recorded[old][0]
    batch = assembled(recorded.sealed(0, logprobs_RG))
    ours = gradient(new_small_model(), recorded.objective, batch)
    assert relative(ours, recorded.part(kind)) < 1e-5


def test_the_clips_bite_in_what_was_recorded(recorded: Recorded) -> None:
    """Or the second gradient would show no more than the first."""
    is_answer = recorded["answer_mask"].bool()
    ratio = (recorded["logprobs"] - recorded["old_logprobs"][0]).exp()[is_answer]
    advantage = recorded["advantages"][:, None].expand(is_answer.shape)[is_answer]
    assert ((ratio > 1.2) & (advantage > 0)).sum() > 10
    assert ((ratio < 0.8) & (advantage < 0)).sum() > 10
    assert ((ratio > recorded.settings["delta"]) & (advantage < 0)).sum() > 5


def test_advantages_are_those_of_trl_but_for_epsilon(recorded: Recorded) -> None:
    """Rewards are thirds, so a group's deviation is at least 0.11: the two are 1e-3 apart at most,
    and a larger epsilon of ours would be noticed here."""
    rewards_R = recorded["rewards"][0].numpy()
    theirs_R = recorded["advantages"].double().numpy()
    np.testing.assert_allclose(
        advantages(rewards_R, epsilon=THEIR_EPSILON), theirs_R, rtol=1e-5, atol=1e-6
    )
    stds_R = rewards_R.reshape(-1, GROUP_SIZE).std(axis=1, ddof=1).repeat(GROUP_SIZE)
    expected_R = theirs_R * (stds_R + THEIR_EPSILON) / (stds_R + 1e-5)
    np.testing.assert_allclose(advantages(rewards_R), expected_R, rtol=1e-5, atol=1e-6)


def test_ten_updates_lead_to_the_weights_of_trl(
    recorded: Recorded, new_small_model: NewModel
) -> None:
    """AdamW as TRL sets it up: its moments, clipping by norm, and decay of matrices only."""
    settings, model = recorded.settings, new_small_model()
    learner = Learner(
        Actor(model, learns_entropy=True),
        recorded.objective,
        Optimizer(
            schedule=Schedule(peak=settings["learning_rate"]),
            weight_decay=settings["weight_decay"],
            max_grad_norm=settings["max_grad_norm"],
        ),
        update_spec=UpdateSpec(),
        forward_pass=ForwardPass(ranks=SingleRank(), micro_batch_tokens=4096),
    )
    before, theirs = recorded.part("before"), recorded.part("after")
    for step, logprobs_RG in enumerate(recorded["old_logprobs"]):
        learner.step(assembled(recorded.sealed(step, logprobs_RG)))
    ours = {name: p.detach() for name, p in model.named_parameters()}
    moved = {name: value - before[name] for name, value in ours.items()}
    assert relative(moved, {name: theirs[name] - before[name] for name in theirs}) < 1e-3
