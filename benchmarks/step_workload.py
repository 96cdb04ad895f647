# SPDX-License-Identifier: Apache-2.0
"""A task of several steps with a reward only at the end, for studies of process rewards.

Each of three turns shows a letter, in a context of its own, and asks for the next one: b after a, a
after the last. The outcome is 1 if all three answers are right, else 0. Owns the attempts: records
as nodes deliver them, cut into samples by the trainer's own code, and traces as `penstock prm
collect` writes them. Trains nothing.

R = attempts, V = vocabulary."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from tokenizers import Tokenizer

from penstock.runs.prm.steps import CUT_OFF, EMPTY
from penstock.trainer.batches import Batch, Roles
from penstock.trainer.prm.traces import Step, Trace
from penstock.trainer.samples import make_samples
from penstock.types import (
    FinishReason,
    GroupId,
    LogProbs,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    TokenIds,
    Trajectory,
    Turn,
    VersionSpan,
)

POLICY = PolicyName("policy")
LETTERS = "abcd"
NUM_STEPS = 3
MAX_TOKENS = 3
"""Of a turn: a letter and the end, or two letters and the end; three letters are cut off."""
END = 1
NODE = "study"
Task = tuple[str, ...]
"""The letter that each turn shows."""
Answer = tuple[list[int], list[float]]
"""Ids and log-probs of a turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a task."""

    task: Task
    turns: tuple[Turn, ...]
    steps: tuple[Step, ...]

    @property
    def actions(self) -> list[str]:
        return [step.action for step in self.steps]

    @property
    def reward(self) -> float:
        is_whole = not any(step.malformed for step in self.steps)
        return float(is_whole and self.actions == [next_letter(shown) for shown in self.task])

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.sampled_ids) // 4 for turn in self.turns)


def make_tasks(rng: random.Random, count: int) -> list[Task]:
    return [tuple(rng.choices(LETTERS, k=NUM_STEPS)) for _ in range(count)]


def next_letter(shown: str) -> str:
    return LETTERS[(LETTERS.index(shown) + 1) % len(LETTERS)]


def right_letter(text: str, *, trace: Trace, step: int) -> float:
    """Labels a step: 1 for the letter that is asked for, else 0."""
    return float(trace.steps[step].action == next_letter(trace.task["shown"][step]))


def long_step(text: str, *, trace: Trace, step: int) -> float:
    """Labels a step by its length alone, as a judge does that likes long answers."""
    return 0.5 * min(len(trace.steps[step].action), 2)


def one_letter(text: str, *, trace: Trace, step: int) -> float:
    """Labels a step: 1 for one letter, whichever."""
    action = trace.steps[step].action
    return float(len(action) == 1 and action in LETTERS)


class Player:
    """Attempts tasks with a model, many at a time."""

    def __init__(self, model: Any, tokenizer: Path, seed: int) -> None:
        self._model = model
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._generator = torch.Generator().manual_seed(seed)

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        self._model.load_state_dict(state)

    def play(self, tasks: Sequence[Task], number: int) -> list[Attempt]:
        """One attempt at each, by the weights as they are, of version `number`. No turn depends on
        another, so all are answered at once."""
        prompts = [f">{shown}" for task in tasks for shown in task]
        encoded = [self._tokenizer.encode(prompt).ids for prompt in prompts]
        answers = self._answer(encoded)
        turns = [_turn(ids, *answer, number) for ids, answer in zip(encoded, answers, strict=True)]
        steps = [self._step(text, ids) for text, (ids, _) in zip(prompts, answers, strict=True)]
        return [
            Attempt(
                task=task,
                turns=tuple(turns[first : first + NUM_STEPS]),
                steps=tuple(steps[first : first + NUM_STEPS]),
            )
            for first, task in zip(range(0, len(prompts), NUM_STEPS), tasks, strict=True)
        ]

    @torch.no_grad()
    def _answer(self, contexts: Sequence[Sequence[int]]) -> list[Answer]:
        """Ids and log-probs of a turn for each context."""
        answers: list[Answer] = [([], []) for _ in contexts]
        for _ in range(MAX_TOKENS):
            open_rows = [row for row, (ids, _) in enumerate(answers) if END not in ids]
            if not open_rows:
                break
            now_RV = self._predict([[*contexts[row], *answers[row][0]] for row in open_rows])
            drawn_R1 = torch.multinomial(now_RV.exp(), 1, generator=self._generator)
            chances: list[float] = cast(Any, now_RV.gather(1, drawn_R1)[:, 0]).tolist()
            drawn: list[int] = cast(Any, drawn_R1[:, 0]).tolist()
            for row, id, chance in zip(open_rows, drawn, chances, strict=True):
                answers[row][0].append(id)
                answers[row][1].append(chance)
        return answers

    def _predict(self, contexts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Log-probs of the next token. Rows are padded at the end, where causal attention does not
        look."""
        lengths_R = torch.tensor([len(context) for context in contexts])
        longest = int(lengths_R.max())
        padded = [[*context, *[0] * (longest - len(context))] for context in contexts]
        logits_RLV = self._model(input_ids=torch.tensor(padded), use_cache=False).logits
        last_RV = logits_RLV[torch.arange(len(contexts)), lengths_R - 1]
        return torch.log_softmax(last_RV, dim=-1)

    def _step(self, prompt: str, ids: Sequence[int]) -> Step:
        text = self._tokenizer.decode(list(ids))
        malformed = CUT_OFF if END not in ids else "" if text.strip() else EMPTY
        return Step(prompt=prompt, action=text, malformed=malformed)


def _turn(
    prompt: Sequence[int], ids: Sequence[int], logprobs: Sequence[float], number: int
) -> Turn:
    return Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=TokenIds(np.array(prompt, "<i4").tobytes()),
        sampled_ids=TokenIds(np.array(ids, "<i4").tobytes()),
        logprobs=LogProbs(np.array(logprobs, "<f4").tobytes()),
        spans=(VersionSpan(start=0, end=len(ids), incarnation=1, number=number),),
        sampling=SamplingSpec(max_tokens=MAX_TOKENS),
        finish=FinishReason.STOP if ids[-1] == END else FinishReason.LENGTH,
    )


def make_batch(attempts: Sequence[Attempt], group_size: int, number: int) -> Batch:
    """As it would be cut from the records that nodes deliver; whole groups, one after another."""
    num_rows = len(attempts)
    rows = ((row, _trajectory(one, row, group_size)) for row, one in enumerate(attempts))
    return Batch(
        seq=number + 1,
        trains_from=number,
        samples=make_samples(rows, POLICY),
        groups_R=np.arange(num_rows) // group_size,
        staleness_R=np.zeros(num_rows, np.int64),
        costs_R=np.ones(num_rows),
        row_columns={"reward": np.array([one.reward for one in attempts])},
        longest_R=np.full(num_rows, MAX_TOKENS),
        roles=Roles.unnamed(num_rows),
        subjects=dict.fromkeys(range(num_rows), NODE),
    )


def _trajectory(attempt: Attempt, row: int, group_size: int) -> Trajectory:
    group, slot = divmod(row, group_size)
    return Trajectory(
        row_id=RowId(f"{group}.{slot}.1"),
        group_id=GroupId(str(group)),
        slot=slot,
        epoch=1,
        attempt=1,
        node_id=NodeId(NODE),
        turns=attempt.turns,
        reward=attempt.reward,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )


def make_trace(attempt: Attempt, row: str) -> Trace:
    return Trace(
        row=row,
        group=row.partition(".")[0],
        task={"shown": list(attempt.task)},
        outcome=OutcomeKind.COMPLETED.value,
        reward=attempt.reward,
        steps=attempt.steps,
    )
