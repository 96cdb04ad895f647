# SPDX-License-Identifier: Apache-2.0
"""Write up to four letters backwards by handing each half to a sub-agent, which does the same.

A call writes one letter, so an agent with a longer text is right only if it delegates: `>` spawns a
sub-agent for each half. What the model must learn is when to delegate, and to copy one letter.
"""

import random
from collections.abc import Mapping

from penstock import Budget, Context, Task

LETTERS = "abcdefghij"
ROLES: Mapping[int, str] = {4: "whole", 2: "half", 1: "letter"}
"""By the length of the text. Turns are compared with those of the same role."""
WRONG = "?"
"""In place of a letter that nobody wrote."""
LIMITS = Budget(max_calls=3, max_depth=1)
"""Of a half: itself and two letters."""


def make_task(ordinal: int, seed: int) -> dict[str, str]:
    """Half of the texts are a single letter, so that copying one is learned from the start."""
    rng = random.Random(f"{seed}/{ordinal}")
    return {"text": "".join(rng.sample(LETTERS, rng.choice((1, 1, 2, 4))))}


async def run(task: Task, ctx: Context) -> str:
    """The workflow, and each of its sub-agents. Each earns its own reward: the share of its letters
    that are right, and a little for delegating, or a random model would hardly ever do it."""
    text = str(task.payload["text"])
    answer = (await ctx.policy(ROLES[len(text)]).chat([{"role": "user", "content": text}])).text
    if len(text) == 1:
        ctx.reward(float(answer == text))
        return answer if len(answer) == 1 else WRONG
    if answer != ">":
        ctx.reward(0.0)
        return WRONG * len(text)
    middle = len(text) // 2
    answer = await _delegate(ctx, text[middle:]) + await _delegate(ctx, text[:middle])
    ctx.reward(0.2 + 0.8 * share_right(answer, text[::-1]))
    return answer


async def _delegate(ctx: Context, text: str) -> str:
    answer: str = await ctx.spawn(run, {"text": text}, role=ROLES[len(text)], budget=LIMITS)
    return answer


def share_right(answer: str, expected: str) -> float:
    return sum(a == b for a, b in zip(answer, expected, strict=True)) / len(expected)
