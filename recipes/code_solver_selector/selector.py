# SPDX-License-Identifier: Apache-2.0
"""A solver writes three programs, a selector picks one of them before any of them runs.

Each program earns 1 if it is right, as a turn; the selector earns 1 if its pick is. The reward of
the row is the selector's: what the two deliver together.
"""

import asyncio
import json

import programs

import penstock

NUM_DRAFTS = 3
PICKS = "abcdefghij"
"""What the selector writes: a, d, g or j for the first program, b, e or h for the second, and so
on, so that an untrained model picks one most of the time."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def run(task: penstock.Task, ctx: penstock.Context) -> None:
    question, solver = task.payload["prompt"], ctx.policy("solver")
    drafts = await asyncio.gather(*(solver.chat([user(question)]) for _ in range(NUM_DRAFTS)))
    listed = ">".join(draft.text for draft in drafts)
    pick = await ctx.policy("selector").chat([user(f"{question}{listed}>>")])
    right = {text: await is_right(task, ctx, text) for text in {draft.text for draft in drafts}}
    for draft in drafts:
        ctx.reward(float(right[draft.text]), turn=draft.turn)
    ctx.reward(sum(right[draft.text] for draft in drafts) / NUM_DRAFTS, role="solver")
    at = PICKS.find(pick.text) if pick.text else -1
    earned = float(at >= 0 and right[drafts[at % NUM_DRAFTS].text])
    ctx.reward(earned, role="selector")
    ctx.reward(earned)


async def is_right(task: penstock.Task, ctx: penstock.Context, text: str) -> bool:
    """Whether the program prints the right outputs, in the sandbox of this attempt."""
    await ctx.sandbox.put("program.py", programs.program(text).encode(errors="replace"))
    done = await ctx.sandbox.exec(["python3", "-I", "program.py"], timeout_s=20.0)
    return done.code == 0 and done.stdout.strip() == json.dumps(task.payload["outputs"])
