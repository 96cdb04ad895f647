# SPDX-License-Identifier: Apache-2.0
"""The demo's learning without its services: sample, score, seal, step, one version behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.unit.trainer.doubles import Sealed, make_learner, make_turn, seal
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from penstock.tasks import reverse
from penstock.trainer.attention import PACKED
from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model
from penstock.types import Turn

NUM_GENERATIONS = 16
MAX_TOKENS = 3
END = 1


@torch.no_grad()
def sample(
    model: PreTrainedModel, prompts: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """(ids, log-probs) of `MAX_TOKENS` tokens after each prompt."""
    model.set_attn_implementation("sdpa")
    ids, logprobs = prompts, list[Tensor]()
    for _ in range(MAX_TOKENS):
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        now = torch.log_softmax(logits, dim=-1)
        chosen = torch.multinomial(now.exp(), 1, generator=generator)
        logprobs.append(now.gather(1, chosen))
        ids = torch.cat([ids, chosen], dim=1)
    model.set_attn_implementation(PACKED)
    return ids[:, prompts.shape[1] :], torch.cat(logprobs, dim=1)


class Rollouts:
    """What two nodes and the dataflow would do, in this process."""

    def __init__(self, folder: Path, seed: int, num_groups: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._num_groups = num_groups

    def batch(self, model: PreTrainedModel, seq: int, number: int) -> Sealed:
        """Batch `seq`, sampled by version `number`."""
        first = (seq - 1) * self._num_groups
        tasks = [reverse.make_task(first + index, self._seed) for index in range(self._num_groups)]
        prompts = torch.tensor([self._tokenizer.encode(task["prompt"]).ids for task in tasks])
        repeated = prompts.repeat_interleave(NUM_GENERATIONS, dim=0)
        sampled, logprobs = sample(model, repeated, self._generator)
        groups: list[list[tuple[Turn, float]]] = [[] for _ in tasks]
        for row, (ids, values) in enumerate(zip(sampled.tolist(), logprobs.tolist(), strict=True)):
            length = ids.index(END) + 1 if END in ids else MAX_TOKENS
            task = tasks[row // NUM_GENERATIONS]
            text = self._tokenizer.decode(ids[:length])
            turn = make_turn(
                prompts[row // NUM_GENERATIONS].tolist(),
                ids[:length],
                logprobs=values[:length],
                number=number,
            )
            reward = reverse.reward([text], [task["answer"]])[0]
            groups[row // NUM_GENERATIONS].append((turn, reward))
        return seal(groups, seq=seq, trains_from=seq - 1)


def train(
    folder: Path, seed: int, *, steps: int, num_groups: int = 64, learning_rate: float = 2e-3
) -> list[float]:
    """Mean reward of each batch; from the second on, each is sampled one version behind."""
    init_model(TINY_QWEN3, folder, seed)
    learner = make_learner(load_model(folder), rate=learning_rate, weight_decay=0.0)
    rollouts = Rollouts(folder, seed, num_groups)
    waiting = rollouts.batch(learner.model, seq=1, number=0)
    rewards: list[float] = []
    for step in range(steps):
        ahead = rollouts.batch(learner.model, seq=step + 2, number=step)
        stats = learner.step(waiting.assembled())
        assert stats.skipped is None
        assert stats.values["staleness/max"] == (0 if step == 0 else 1)
        rewards.append(stats.values["reward/mean"])
        waiting = ahead
    return rewards


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_reward_rises_within_a_few_steps(tmp_path: Path) -> None:
    rewards = train(tmp_path / "model", seed=0, steps=24, num_groups=32)
    assert mean(rewards[:2]) < 0.12
    assert mean(rewards[-3:]) > 0.2


def test_without_a_learning_rate_nothing_rises(tmp_path: Path) -> None:
    rewards = train(tmp_path / "model", seed=0, steps=12, num_groups=32, learning_rate=0.0)
    assert mean(rewards[-3:]) < 0.12


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_the_demo_learns(tmp_path: Path, seed: int) -> None:
    rewards = train(tmp_path / "model", seed, steps=70)
    assert mean(rewards[:2]) <= 0.35
    assert mean(rewards[-5:]) >= 0.8


def test_the_trainer_finds_the_log_probs_of_the_sampler(
    new_model: Callable[[], PreTrainedModel], model_folder: Path
) -> None:
    learner = make_learner(new_model(), rate=0.0)
    batch = Rollouts(model_folder, seed=0, num_groups=16).batch(learner.model, seq=1, number=0)
    values = learner.step(batch.assembled()).values
    assert values["mismatch"] < 1e-6
    assert values["clip_ratio"] == 0
    assert values["kl"] < 1e-6
