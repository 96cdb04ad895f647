# SPDX-License-Identifier: Apache-2.0
"""A small language model as the learner of `data_algorithms`; its sampling and its updates are
those of `lagged_training`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.lagged_training import NUM_GENERATIONS, ActorCritic, Answers, Sampler, make_batch
from benchmarks.reverse_tasks import is_solved, make_tasks
from benchmarks.staleness_sweep import Setting, new_learner
from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model
from penstock.types import JsonObject, Manifest, RowId, Task

SETTING = Setting(learning_rate=2e-3, minibatches=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    prompt: str
    ids: Sequence[int]
    logprobs: Sequence[float]
    number: int
    """Version that sampled it."""


@dataclass(slots=True)
class SmallLm:
    """Answers whole leases at once, and trains the batches that the service seals."""

    folder: Path
    seed: int
    rollouts: dict[RowId, Rollout] = field(default_factory=dict[RowId, Rollout])
    rewards: dict[RowId, float] = field(default_factory=dict[RowId, float])
    number: int = 0
    _accuracy: tuple[int, float] = (-1, 0.0)
    """Of which version, and what it is."""
    trainee: ActorCritic = field(init=False)
    sampler: Sampler = field(init=False)
    tasks: list[JsonObject] = field(init=False)

    def __post_init__(self) -> None:
        model = self.folder / "model"
        init_model(TINY_QWEN3, model, self.seed)
        self.trainee = ActorCritic(new_learner("ppo", model, SETTING))
        self.sampler = Sampler(load_model(model), model / "tokenizer.json", self.seed)
        self.tasks = make_tasks(self.seed)

    @property
    def accuracy(self) -> float:
        """Of all tasks, by a whole group of answers to each."""
        if self._accuracy[0] == self.number:
            return self._accuracy[1]
        answers = self._answer([task["prompt"] for task in self.tasks])
        solved = [
            is_solved(text, task)
            for task, texts in zip(self.tasks, self._texts(answers), strict=True)
            for text in texts
        ]
        self._accuracy = self.number, sum(solved) / len(solved)
        return self._accuracy[1]

    def reward(self, task: Task, grant: Grant, live: Sequence[LiveVersion]) -> float:
        return self.rewards[grant.row_id]

    def prepare(self, leased: Sequence[tuple[Task, Grant]]) -> None:
        """Roll out all of these. The service leases whole groups, so each prompt is read once."""
        groups: dict[str, tuple[Task, list[Grant]]] = {}
        for task, grant in leased:
            groups.setdefault(grant.group_id, (task, []))[1].append(grant)
        answers = self._answer([task.payload["prompt"] for task, _ in groups.values()])
        texts = self._texts(answers)
        for place, (task, grants) in enumerate(groups.values()):
            for grant in grants:
                row = place * NUM_GENERATIONS + grant.slot
                length = int(answers.lengths_R[row])
                self.rollouts[grant.row_id] = Rollout(
                    prompt=task.payload["prompt"],
                    ids=answers.ids_RG[row, :length].tolist(),
                    logprobs=answers.logprobs_RG[row, :length].tolist(),
                    number=self.number,
                )
                solved = is_solved(texts[place][grant.slot], task.payload)
                self.rewards[grant.row_id] = float(solved)

    def train(self, batch: Manifest) -> None:
        """One step on the rows of the batch, each with the version that sampled it."""
        rows = [row for group in batch.groups for row in group.rows]
        made = [self.rollouts[row.row_id] for row in rows]
        prompts = np.array([self.sampler.encode(one.prompt) for one in made])
        rewards_R = np.array([row.score for row in rows])
        numbers_R = np.array([one.number for one in made])
        self.trainee.step(
            make_batch(prompts, _answers(made), rewards_R, numbers_R, batch.trains_from)
        )
        self.number += 1
        self.sampler.load(self.trainee.actor.model.state_dict())

    def _answer(self, prompts: Sequence[str]) -> Answers:
        return self.sampler.answer(np.array([self.sampler.encode(prompt) for prompt in prompts]))

    def _texts(self, answers: Answers) -> list[list[str]]:
        texts = self.sampler.texts(answers)
        return [texts[at : at + NUM_GENERATIONS] for at in range(0, len(texts), NUM_GENERATIONS)]


def _answers(made: Sequence[Rollout]) -> Answers:
    width = max(len(one.ids) for one in made)
    pad = [list(one.ids) + [0] * (width - len(one.ids)) for one in made]
    chances = [list(one.logprobs) + [0.0] * (width - len(one.ids)) for one in made]
    return Answers(
        ids_RG=np.array(pad),
        logprobs_RG=np.array(chances, dtype=np.float32),
        lengths_R=np.array([len(one.ids) for one in made]),
    )
