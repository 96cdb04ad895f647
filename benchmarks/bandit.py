# SPDX-License-Identifier: Apache-2.0
"""A task set of mixed difficulty and a learner of a few numbers: policy gradient without a model.

A task succeeds with probability sigmoid(skill of its topic + general skill - difficulty). One
answer is one draw. Training is GRPO with PPO's clip over whole groups, exactly as a trainer of a
language model does it; a group whose members all earn the same teaches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import numpy.typing as npt

from penstock.types import Manifest, PolicyName

Floats = npt.NDArray[np.float64]

TOPICS = 8
CLIP = 0.2
MIN_STD = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """N tasks; a third is all but solved from the start, a third is far out of reach."""

    topic_N: npt.NDArray[np.int64]
    difficulty_N: Floats

    @classmethod
    def draw(cls, rng: np.random.Generator, num_tasks: int) -> TaskSet:
        means = np.repeat([-5.0, 1.0, 6.0], [num_tasks // 3, num_tasks // 3, num_tasks])[:num_tasks]
        return cls(
            topic_N=rng.integers(TOPICS, size=num_tasks),
            difficulty_N=rng.permutation(means) + rng.normal(0.0, 0.7, num_tasks),
        )


@dataclass(slots=True)
class Learner:
    """Topic skills and a general one; what each version knew is kept for the ratio."""

    tasks: TaskSet
    learning_rate: float = 0.5
    skills: Floats = field(default_factory=lambda: np.zeros(TOPICS + 1))
    versions: list[Floats] = field(default_factory=list[Floats])
    """By number."""

    def __post_init__(self) -> None:
        self.versions.append(self.skills.copy())

    def chance(self, task: int, number: int = -1) -> float:
        """That this version answers this task well."""
        skills = self.versions[number]
        topic = int(self.tasks.topic_N[task])
        logit = float(skills[topic]) + float(skills[-1]) - float(self.tasks.difficulty_N[task])
        return 1 / (1 + math.exp(-logit))

    @property
    def accuracy(self) -> float:
        """Exactly, over the whole set."""
        return fmean(self.chance(task) for task in range(len(self.tasks.topic_N)))

    def train(self, batch: Manifest, tasks: Sequence[int]) -> None:
        """One step; `tasks` says which task each group of the batch is of."""
        gradient = np.zeros_like(self.skills)
        num_rows = 0
        for group, task in zip(batch.groups, tasks, strict=True):
            rewards_G = np.array([row.score for row in group.rows])
            num_rows += len(rewards_G)
            if rewards_G.std() < MIN_STD:
                continue
            advantages_G = (rewards_G - rewards_G.mean()) / rewards_G.std()
            policy = PolicyName(batch.consumer)
            old_G = np.array([self.chance(task, row.versions[policy][0][1]) for row in group.rows])
            slope = self._slope(task, rewards_G, advantages_G, old_G)
            gradient[self.tasks.topic_N[task]] += slope
            gradient[-1] += slope
        self.skills = self.skills + self.learning_rate * gradient / num_rows
        self.versions.append(self.skills.copy())

    def _slope(
        self, task: int, rewards_G: Floats, advantages_G: Floats, old_G: Floats
    ) -> np.float64:
        """Of the clipped objective by the logit of this task, summed over a group."""
        chance = self.chance(task)
        now_G = np.where(rewards_G > 0, chance, 1 - chance)
        then_G = np.where(rewards_G > 0, old_G, 1 - old_G)
        ratio_G = now_G / then_G
        is_flat_G = np.where(advantages_G > 0, ratio_G > 1 + CLIP, ratio_G < 1 - CLIP)
        score_G = rewards_G - chance
        return np.sum(np.where(is_flat_G, 0.0, ratio_G * advantages_G * score_G))
