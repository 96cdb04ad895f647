# SPDX-License-Identifier: Apache-2.0
"""Sums and differences of numbers up to 40 that are one digit: tasks, workflow and reward.

The model goes on with a text of a solved problem and one that is not; its next token is the
answer. The problems are few enough to list; some are held out, and no task is ever made of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 40
NUM_HELD_OUT = 200
DIGITS = tuple("0123456789")
"""Each is one token."""


@dataclass(frozen=True, slots=True)
class Problem:
    left: int
    sign: str
    right: int

    @property
    def prompt(self) -> str:
        return "".join(f"{one.question}{one.answer}\n" for one in SHOWN) + self.question

    @property
    def question(self) -> str:
        return f"{self.left} {self.sign} {self.right} = "

    @property
    def answer(self) -> str:
        return str(self.left + self.right if self.sign == "+" else self.left - self.right)


SHOWN = (Problem(7, "+", 5),)
"""Solved in every prompt."""


def _all_problems() -> list[Problem]:
    numbers = range(1, LARGEST + 1)
    every = [Problem(a, sign, b) for sign in "+-" for a in numbers for b in numbers]
    return [one for one in every if one.answer in DIGITS]


def split() -> tuple[list[Problem], list[Problem]]:
    """Those to train on, and those held out; the same for ever."""
    problems = _all_problems()
    random.Random("smollm2-arithmetic").shuffle(problems)
    return problems[NUM_HELD_OUT:], problems[:NUM_HELD_OUT]


TRAINED, HELD_OUT = split()


def make_task(ordinal: int, seed: int) -> dict[str, Any]:
    """Every problem once, in an order that the seed decides, then again in another."""
    lap, place = divmod(ordinal, len(TRAINED))
    order = list(range(len(TRAINED)))
    random.Random(f"{seed}/{lap}").shuffle(order)
    problem = TRAINED[order[place]]
    return {"prompt": problem.prompt, "answer": problem.answer}


async def run(task: Any, ctx: Any) -> str:
    """The workflow: the text as it is, without a chat template."""
    answer = await ctx.policy().complete(task.payload["prompt"])
    return answer.text


def reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the right digit, else 0."""
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]
