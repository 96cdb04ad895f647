# SPDX-License-Identifier: Apache-2.0
"""Sums and differences of numbers up to 20: tasks, workflow and reward. Plain Python.

The model goes on with a text of a solved problem and one that is not. The problems are few
enough to list; some are held out, and no task is ever made of them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 20
NUM_HELD_OUT = 200


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
"""Solved in every prompt; never asked."""


def _all_problems() -> list[Problem]:
    numbers = range(1, LARGEST + 1)
    sums = [Problem(a, "+", b) for a in numbers for b in numbers]
    differences = [Problem(a, "-", b) for a in numbers for b in numbers if a >= b]
    return [one for one in sums + differences if one not in SHOWN]


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
    """1 where the text begins with the answer and no further digit, else 0."""
    numbers = [re.match(r"\d+", text) for text in completions]
    return [
        float(number is not None and number.group() == right)
        for number, right in zip(numbers, answer, strict=True)
    ]
