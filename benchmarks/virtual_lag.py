# SPDX-License-Identifier: Apache-2.0
"""The demo task without services: learner and sampler in one process, so many versions apart.

Owns the lag: each batch is sampled by weights that are exactly `lag` versions older than those it
trains. The learner, its objectives and its advantages are the trainer's own.

R = rows, G = tokens generated, T = tokens of all samples, S = samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from penstock.tasks import reverse
from penstock.trainer.advantages import final_rewards, group_advantages, moments, normalised
from penstock.trainer.batches import Batch
from penstock.trainer.gae import OLD_VALUES, RETURNS, Gae
from penstock.trainer.inputs import PROXIMAL
from penstock.trainer.learner import Learner
from penstock.trainer.samples import cut
from penstock.types import (
    FinishReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)

POLICY = PolicyName("policy")
NUM_TOKENS, END = 3, 1
NUM_GENERATIONS = 16

Ints = npt.NDArray[np.int64]
State = dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    ids_RG: Ints
    logprobs_RG: npt.NDArray[np.float32]
    lengths_R: Ints


class Sampler:
    """A model that follows the learner's at a distance, and tasks without end."""

    def __init__(self, model: Any, tokenizer: Path, seed: int) -> None:
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._generator = torch.Generator().manual_seed(seed)
        self._seed = seed
        self._num_tasks = 0

    def load(self, state: State) -> None:
        self._model.load_state_dict(state)

    def batch(self, num_groups: int, *, number: int, trains_from: int) -> Batch:
        """Fresh tasks answered by the weights loaded, which are of version `number`."""
        ordinals = range(self._num_tasks, self._num_tasks + num_groups)
        self._num_tasks += num_groups
        tasks = [reverse.make_task(ordinal, self._seed) for ordinal in ordinals]
        prompts: list[list[int]] = [self._tokenizer.encode(task["prompt"]).ids for task in tasks]
        answers = self._answer(torch.tensor(prompts).repeat_interleave(NUM_GENERATIONS, dim=0))
        truths = [task["answer"] for task in tasks for _ in range(NUM_GENERATIONS)]
        return _batch(prompts, answers, self._score(answers, truths), number, trains_from)

    @torch.no_grad()
    def _answer(self, prompts: Tensor) -> Answers:
        ids, logprobs = prompts, list[Tensor]()
        for _ in range(NUM_TOKENS):
            logits = self._model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
            now = torch.log_softmax(logits, dim=-1)
            chosen = torch.multinomial(now.exp(), 1, generator=self._generator)
            logprobs.append(now.gather(1, chosen))
            ids = torch.cat([ids, chosen], dim=1)
        ids_RG = ids[:, prompts.shape[1] :].numpy()
        is_end_RG = ids_RG == END
        lengths_R = np.where(is_end_RG.any(axis=1), is_end_RG.argmax(axis=1) + 1, NUM_TOKENS)
        return Answers(
            ids_RG=ids_RG, logprobs_RG=torch.cat(logprobs, dim=1).numpy(), lengths_R=lengths_R
        )

    def _score(self, answers: Answers, truths: Sequence[str]) -> npt.NDArray[np.float64]:
        texts = [
            self._tokenizer.decode(ids[:length].tolist())
            for ids, length in zip(answers.ids_RG, answers.lengths_R, strict=True)
        ]
        return np.array(reverse.reward(texts, truths))


def _batch(
    prompts: Sequence[Sequence[int]],
    answers: Answers,
    rewards_R: npt.NDArray[np.float64],
    number: int,
    trains_from: int,
) -> Batch:
    """The records as a node would have delivered them, cut as the trainer cuts them."""
    rows = (
        (row, _trajectory(row, prompts[row // NUM_GENERATIONS], answers, number))
        for row in range(rewards_R.size)
    )
    return Batch(
        seq=trains_from + 1,
        trains_from=trains_from,
        samples=cut(rows, POLICY),
        groups_R=np.repeat(np.arange(len(prompts)), NUM_GENERATIONS),
        staleness_R=np.full(rewards_R.size, trains_from - number),
        columns={"reward": rewards_R},
    )


def _trajectory(row: int, prompt: Sequence[int], answers: Answers, number: int) -> Trajectory:
    length = int(answers.lengths_R[row])
    turn = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids(prompt),
        sampled_ids=token_ids(answers.ids_RG[row, :length].tolist()),
        logprobs=log_probs(answers.logprobs_RG[row, :length].tolist()),
        spans=(VersionSpan(start=0, end=length, incarnation=1, number=number),),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
    )
    return Trajectory(
        row_id=RowId(f"p0-{row}.0.1"),
        group_id=GroupId(f"p0-{row}"),
        slot=0,
        epoch=1,
        attempt=1,
        node_id=NodeId("here"),
        turns=(turn,),
        reward=0.0,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )


class Trainee:
    """An actor, and its critic where it has one."""

    def __init__(
        self, actor: Learner, critic: Learner | None = None, *, needs_proximal: bool = False
    ) -> None:
        self.actor = actor
        self._critic = critic
        self._needs_proximal = needs_proximal

    def step(self, batch: Batch) -> None:
        batch = self._criticised(batch) if self._critic else _compared(batch)
        if self._needs_proximal:
            batch = batch.with_columns({PROXIMAL: self.actor.look(batch)})
        self.actor.step(batch)

    def _criticised(self, batch: Batch) -> Batch:
        """Advantages from the critic's values; then the critic learns from the returns."""
        assert self._critic is not None
        samples, values_T = batch.samples, self._critic.look(batch)
        mask_T, ends_S = samples.mask_T, samples.ends_S
        rewards_T = final_rewards(
            batch.columns["reward"], mask_T, samples.starts_S, ends_S, samples.rows_S
        )
        found = Gae(trace=0.95)(rewards_T, values_T, mask_T, ends_S)
        scale = moments(found.advantages_T, mask_T)
        batch = batch.with_columns(
            {
                OLD_VALUES: values_T,
                RETURNS: found.returns_T,
                "advantage": normalised(found.advantages_T, mask_T, scale),
            }
        )
        self._critic.step(batch)
        return batch


def _compared(batch: Batch) -> Batch:
    advantages_R = group_advantages(batch.columns["reward"], batch.groups_R)
    return batch.with_columns({"advantage": advantages_R[batch.rows_T]})


def train(
    trainee: Trainee, sampler: Sampler, *, lag: int, steps: int, num_groups: int
) -> list[float]:
    """Mean reward of what each version answers, itself: not of what it trains on, which is older.

    The first `lag` versions train on answers of version 0, as a run does that has just begun.
    """
    states: deque[State] = deque([_copy(trainee.actor)], maxlen=lag + 1)
    rewards: list[float] = []
    for step in range(steps):
        sampler.load(states[0])
        oldest = step - len(states) + 1
        batch = sampler.batch(num_groups, number=oldest, trains_from=step)
        trainee.step(batch)
        states.append(_copy(trainee.actor))
        sampler.load(states[-1])
        fresh = sampler.batch(4, number=step + 1, trains_from=step + 1)
        rewards.append(float(fresh.columns["reward"].mean()))
    return rewards


def _copy(learner: Learner) -> State:
    return {name: value.detach().clone() for name, value in learner.model.state_dict().items()}
