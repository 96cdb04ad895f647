# SPDX-License-Identifier: Apache-2.0
"""The demo task without services: learner and sampler in one process, so many versions apart.

Owns the lag: each batch is sampled by weights that are exactly `lag` versions older than those it
trains. The learner, its objectives and its advantages are the trainer's own.

R = rows, P = tokens of a prompt, G = of an answer, L = of both, V = vocabulary, T = tokens of all
samples, S = samples."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.tasks import reverse
from penstock.trainer.advantages.baselines import (
    final_rewards,
    group_advantages,
    moments,
    normalised,
)
from penstock.trainer.advantages.gae import OLD_VALUES, RETURNS, estimate_advantages
from penstock.trainer.batches import Batch, Roles
from penstock.trainer.inputs import PROXIMAL
from penstock.trainer.learner import Learner
from penstock.trainer.samples import Samples

NUM_TOKENS, END = 3, 1
NUM_GENERATIONS = 8

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    ids_RG: Ints
    logprobs_RG: npt.NDArray[np.float32]
    lengths_R: Ints


class Sampler:
    """A model that follows the learner's at a distance, and tasks without end."""

    def __init__(
        self, model: Any, tokenizer: Path, seed: int, *, group_size: int = NUM_GENERATIONS
    ) -> None:
        self._model = model
        self._group_size = group_size
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._num_tasks = 0

    def load(self, state: State) -> None:
        self._model.load_state_dict(state)

    def batch(self, num_groups: int, *, number: int, trains_from: int) -> Batch:
        """Fresh tasks answered by the weights loaded, which are of version `number`."""
        prompts, answers, rewards_R = self._play(num_groups)
        prompts_RP = np.repeat(prompts, self._group_size, axis=0)
        numbers_R = np.full(rewards_R.size, number)
        batch = make_batch(prompts_RP, answers, rewards_R, numbers_R, trains_from)
        return replace(batch, groups_R=np.arange(rewards_R.size) // self._group_size)

    def reward(self, num_groups: int) -> float:
        """What the weights loaded earn with fresh tasks, on average."""
        return float(self._play(num_groups)[2].mean())

    def _play(self, num_groups: int) -> tuple[Ints, Answers, Floats]:
        ordinals = range(self._num_tasks, self._num_tasks + num_groups)
        self._num_tasks += num_groups
        tasks = [reverse.make_task(ordinal, self._seed) for ordinal in ordinals]
        prompts = np.array([self.encode(task["prompt"]) for task in tasks])
        answers = self.answer(prompts, copies=self._group_size)
        truths = [task["answer"] for task in tasks for _ in range(self._group_size)]
        return prompts, answers, np.array(reverse.reward(self.texts(answers), truths))

    def encode(self, prompt: str) -> list[int]:
        return self._tokenizer.encode(prompt).ids

    @torch.no_grad()
    def answer(
        self, prompts: Ints, *, copies: int = NUM_GENERATIONS, max_tokens: int = NUM_TOKENS
    ) -> Answers:
        """So many answers to each prompt, which is read once for all of them."""
        out = self._model(input_ids=torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        out.past_key_values.batch_repeat_interleave(copies)
        logits_RV = out.logits[:, -1].repeat_interleave(copies, dim=0)
        ids, logprobs = list[Tensor](), list[Tensor]()
        while True:
            now_RV = torch.log_softmax(logits_RV, dim=-1)
            ids.append(torch.multinomial(now_RV.exp(), 1, generator=self._generator))
            logprobs.append(now_RV.gather(1, ids[-1]))
            if len(ids) == max_tokens:
                break
            out = self._model(input_ids=ids[-1], past_key_values=out.past_key_values)
            logits_RV = out.logits[:, -1]
        ids_RG = torch.cat(ids, dim=1).numpy()
        is_end_RG = ids_RG == END
        lengths_R = np.where(is_end_RG.any(axis=1), is_end_RG.argmax(axis=1) + 1, max_tokens)
        return Answers(
            ids_RG=ids_RG, logprobs_RG=torch.cat(logprobs, dim=1).numpy(), lengths_R=lengths_R
        )

    def texts(self, answers: Answers) -> list[str]:
        return [
            self._tokenizer.decode(ids[:length].tolist())
            for ids, length in zip(answers.ids_RG, answers.lengths_R, strict=True)
        ]


def make_batch(
    prompts_RP: Ints, answers: Answers, rewards_R: Floats, numbers_R: Ints, trains_from: int
) -> Batch:
    """As it would be cut from the records that nodes deliver; whole groups, one after another."""
    num_rows = rewards_R.size
    return Batch(
        seq=trains_from + 1,
        trains_from=trains_from,
        samples=_samples(prompts_RP, answers, numbers_R),
        groups_R=np.arange(num_rows) // NUM_GENERATIONS,
        staleness_R=trains_from - numbers_R,
        costs_R=np.ones(num_rows),  # one rank, which computes them all
        row_columns={"reward": rewards_R},
        longest_R=answers.lengths_R,
        roles=Roles.unnamed(num_rows),
    )


def _samples(prompts_RP: Ints, answers: Answers, numbers_R: Ints) -> Samples:
    """One per row; a sample has one turn."""
    num_prompt: int = prompts_RP.shape[1]
    num_answer: int = answers.ids_RG.shape[1]
    place_L = np.arange(num_prompt + num_answer) - num_prompt
    is_there_RL = place_L < answers.lengths_R[:, None]
    ids_RL = np.concatenate([prompts_RP, answers.ids_RG], axis=1)
    logprobs_RL = np.pad(answers.logprobs_RG, ((0, 0), (num_prompt, 0)))
    place_T = np.broadcast_to(place_L, ids_RL.shape)[is_there_RL]
    ends_S = np.cumsum(num_prompt + answers.lengths_R)
    shape = place_T.shape
    numbers_T = np.broadcast_to(numbers_R[:, None], ids_RL.shape)[is_there_RL]
    return Samples(
        starts_S=ends_S - num_prompt - answers.lengths_R,
        ends_S=ends_S,
        rows_S=np.arange(len(prompts_RP)),
        ids_T=ids_RL[is_there_RL].astype(np.int32),
        mask_T=place_T >= 0,
        logprobs_T=logprobs_RL[is_there_RL],
        versions_T=np.where(place_T >= 0, numbers_T, -1).astype(np.int32),
        turns_T=np.zeros(shape, np.int32),
        roles_T=np.zeros(shape, np.int32),
        rewards_T=np.full(shape, np.nan),
        agents_T=np.zeros(shape, np.int32),
        spawners_T=np.zeros(shape, np.int32),
        sampled_T=np.maximum(place_T, 0),
        temperature_T=np.ones(shape, np.float32),
        top_k_T=np.zeros(shape, np.int32),
        top_p_T=np.ones(shape, np.float32),
        min_p_T=np.zeros(shape, np.float32),
        experts_T=np.zeros((*shape, 0), np.uint8),
    )


class ActorCritic:
    """An actor, and its critic where it has one."""

    def __init__(
        self, actor: Learner, critic: Learner | None = None, *, needs_proximal: bool = False
    ) -> None:
        self.actor = actor
        self._critic = critic
        self._needs_proximal = needs_proximal

    def step(self, batch: Batch) -> None:
        batch = self._with_critic_advantages(batch) if self._critic else _compared(batch)
        if self._needs_proximal:
            batch = batch.with_columns(token_columns={PROXIMAL: self.actor.infer(batch)})
        self.actor.step(batch)

    def _with_critic_advantages(self, batch: Batch) -> Batch:
        """Advantages from the critic's values; then the critic learns from the returns."""
        assert self._critic is not None
        samples, values_T = batch.samples, self._critic.infer(batch)
        mask_T, ends_S = samples.mask_T, samples.ends_S
        rewards_T = final_rewards(
            batch.row_columns["reward"], mask_T, samples.starts_S, ends_S, samples.rows_S
        )
        advantages_T, returns_T = estimate_advantages(rewards_T, values_T, mask_T, ends_S, lam=0.95)
        scale = moments(advantages_T, mask_T)
        batch = batch.with_columns(
            token_columns={
                OLD_VALUES: values_T,
                RETURNS: returns_T,
                "advantage": normalised(advantages_T, mask_T, scale),
            }
        )
        self._critic.step(batch)
        return batch


def _compared(batch: Batch) -> Batch:
    advantages_R = group_advantages(batch.row_columns["reward"], batch.groups_R)
    return batch.with_columns(token_columns={"advantage": advantages_R[batch.rows_T]})


def train(
    trainee: ActorCritic,
    sampler: Sampler,
    *,
    lag: int,
    steps: int,
    num_groups: int,
    num_evaluated: int = 1,
) -> float:
    """Mean reward of the answers of the last `num_evaluated` versions themselves: not of what they
    train on, which is older.

    The first `lag` versions train on answers of version 0, as a run does that has just begun.
    """
    states: deque[State] = deque([copy_weights(trainee.actor)], maxlen=lag + 1)
    rewards: list[float] = []
    for step in range(steps):
        sampler.load(states[0])
        oldest = step - len(states) + 1
        batch = sampler.batch(num_groups, number=oldest, trains_from=step)
        trainee.step(batch)
        states.append(copy_weights(trainee.actor))
        if step >= steps - num_evaluated:
            sampler.load(states[-1])
            rewards.append(sampler.reward(num_groups))
    return statistics.fmean(rewards)


def copy_weights(learner: Learner) -> State:
    return {name: value.detach().clone() for name, value in learner.model.state_dict().items()}
