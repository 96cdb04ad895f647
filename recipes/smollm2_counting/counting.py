# SPDX-License-Identifier: Apache-2.0
"""Counting on in numbers of three digits: tasks, workflow, reward, and the held-out questions.

The model goes on with a text that counts. An answer is seven numbers: 34 tokens, one for each
digit, comma and space. The run samples as many. Some starts are held out, and no task is ever made
of them: `counting.py FILE` writes them as a suite.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SMALLEST, LARGEST = 100, 999
NUM_SHOWN = 4
NUM_ASKED = 7
NUM_HELD_OUT = 128
SEPARATOR = ", "
BEGINNING = "numbers = ["
"""Of every prompt. Without it, the untrained model soon turns to another text than numbers."""


def prompt_of(first: int) -> str:
    return f"{BEGINNING}{_text(first, NUM_SHOWN)}{SEPARATOR.rstrip()}"


def answer_of(first: int) -> str:
    return _text(first + NUM_SHOWN, NUM_ASKED)


def _text(first: int, num: int) -> str:
    return SEPARATOR.join(str(number) for number in range(first, first + num))


def split() -> tuple[list[int], list[int]]:
    """First numbers to train on, and those held out; the same for ever."""
    firsts = list(range(SMALLEST, LARGEST - NUM_SHOWN - NUM_ASKED + 2))
    random.Random("smollm2-counting").shuffle(firsts)
    return firsts[NUM_HELD_OUT:], firsts[:NUM_HELD_OUT]


TRAINED, HELD_OUT = split()


def make_task(ordinal: int, seed: int) -> dict[str, Any]:
    """Every start once, in an order that the seed decides, then again in another."""
    lap, place = divmod(ordinal, len(TRAINED))
    order = list(TRAINED)
    random.Random(f"{seed}/{lap}").shuffle(order)
    return {"prompt": prompt_of(order[place]), "answer": answer_of(order[place])}


async def run(task: Any, ctx: Any) -> str:
    """The workflow: the text as it is, without a chat template."""
    answer = await ctx.policy().complete(task.payload["prompt"])
    return answer.text


def reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """The share of numbers that are right before the first that is wrong."""
    pairs = zip(completions, answer, strict=True)
    return [_num_right(text, right) / NUM_ASKED for text, right in pairs]


def is_right(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 if all numbers are right, else 0: the accuracy of an evaluation."""
    return [float(share == 1) for share in reward(completions, answer)]


def _num_right(text: str, right: str) -> int:
    """Numbers that are right, from the first; each must be separated as shown."""
    expected = [f" {number}" for number in right.split(SEPARATOR)]
    found = text.split(SEPARATOR.rstrip())
    pairs = enumerate(zip(found, expected, strict=False))
    shorter = min(len(found), len(expected))
    return next((place for place, (one, other) in pairs if one != other), shorter)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("counting.py FILE.jsonl: where to write the held-out questions")
    rows = [
        {"question": f"from-{first}", "prompt": prompt_of(first), "answer": answer_of(first)}
        for first in HELD_OUT
    ]
    Path(sys.argv[1]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


if __name__ == "__main__":
    main()
