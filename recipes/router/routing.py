# SPDX-License-Identifier: Apache-2.0
"""A router reads a task and picks the specialist that answers it. Three policies are trained.

Owns the tasks of two kinds, the workflow and its rewards. A specialist is trained only on the tasks
that the router sent to it, so router and specialists find a division of labour together.
"""

import random

import penstock

LETTERS = "abcdefgh"
KINDS = {"i": lambda letter: letter, "j": lambda letter: LETTERS[::-1][LETTERS.index(letter)]}
"""What is asked for, by the first letter of a prompt: the same letter, or the one as far from the
other end. An answer that is right for one kind is always wrong for the other."""
SPECIALISTS = ("first", "second")
PICKS = "abcdefghij"
"""What the router writes: a, c, e, g or i for the first specialist, b, d, f, h or j for the second,
so that an untrained model picks one most of the time."""


def make_task(ordinal: int, seed: int) -> dict[str, str]:
    rng = random.Random(f"{seed}/{ordinal}")
    kind, letter = rng.choice(tuple(KINDS)), rng.choice(LETTERS[:3])
    return {"kind": kind, "letter": letter, "answer": KINDS[kind](letter)}


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def run(task: penstock.Task, ctx: penstock.Context) -> None:
    """The specialist does not see the kind: only the choice of the router tells it."""
    kind, letter = task.payload["kind"], task.payload["letter"]
    pick = await ctx.policy("router").chat(user(f"{kind}>"))
    at = PICKS.find(pick.text) if pick.text else -1
    if at < 0:
        ctx.reward(0.0)
        return
    chosen = SPECIALISTS[at % len(SPECIALISTS)]
    answer = await ctx.policy(chosen).chat(user(f"{letter}>"))
    ctx.reward(float(answer.text == task.payload["answer"]))
