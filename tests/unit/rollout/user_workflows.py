# SPDX-License-Identifier: Apache-2.0
"""Workflows as users write them, good and bad."""

from __future__ import annotations

import asyncio
import sys

from penstock.rollout.context import Context
from penstock.types import Task


async def ask(ctx: Context, text: str = "abc>") -> str:
    answer = await ctx.policy("policy").chat([{"role": "user", "content": text}])
    return answer.text


async def returns_text(task: Task, ctx: Context) -> str:
    return await ask(ctx, task.payload["prompt"])


async def completes(task: Task, ctx: Context) -> str:
    answer = await ctx.policy("policy").complete(task.payload["prompt"], max_tokens=2)
    return answer.text


num_running = most_running = 0


async def staggered(task: Task, ctx: Context) -> str:
    global num_running, most_running
    num_running += 1
    most_running = max(most_running, num_running)
    await asyncio.sleep(0.01 * (ctx.seed % 16))
    num_running -= 1
    return await ask(ctx, task.payload["prompt"])


async def returns_none(task: Task, ctx: Context) -> None:
    await ask(ctx, "jjj>")
    await ask(ctx, task.payload["prompt"])


async def returns_number(task: Task, ctx: Context) -> float:
    await ask(ctx)
    return 0.25


async def sets_reward(task: Task, ctx: Context) -> None:
    await ask(ctx)
    ctx.reward(1)
    ctx.reward(0.75)


async def rewards_roles_and_turns(task: Task, ctx: Context) -> None:
    messages = [{"role": "user", "content": "abc>"}]
    await ctx.policy("policy", role="solver").chat(messages)
    judged = await ctx.policy("policy", role="verifier").chat(messages)
    ctx.reward(0.25, role="solver")
    ctx.reward(0.75, role="verifier")
    ctx.reward(-1, turn=judged.turn)


async def rewards_nobody(task: Task, ctx: Context) -> None:
    await ask(ctx)
    ctx.reward(1.0, role="solvr")


async def rewards_no_turn(task: Task, ctx: Context) -> None:
    await ask(ctx)
    ctx.reward(1.0, turn=1)


async def returns_nonsense(task: Task, ctx: Context) -> dict[str, int]:
    await ask(ctx)
    return {"reward": 1}


async def raises(task: Task, ctx: Context) -> None:
    await ask(ctx)
    raise KeyError("my own mistake" + "!" * 10_000)


async def raises_surrogates(task: Task, ctx: Context) -> None:
    raise ValueError("half a character \ud800")


async def returns_surrogates(task: Task, ctx: Context) -> str:
    await ask(ctx)
    return "a\ud800"


async def exits(task: Task, ctx: Context) -> None:
    sys.exit("goodbye")


async def calls_nobody(task: Task, ctx: Context) -> str:
    return "made up"


async def answers_then_hangs(task: Task, ctx: Context) -> None:
    await ask(ctx, task.payload["prompt"])
    await asyncio.sleep(60)


async def hangs(task: Task, ctx: Context) -> None:
    await asyncio.sleep(60)


async def hangs_at_first(task: Task, ctx: Context) -> str:
    if ctx.seed < 14:
        await asyncio.sleep(60)
    return await ask(ctx, task.payload["prompt"])


async def own_timeout(task: Task, ctx: Context) -> None:
    raise TimeoutError("of the user's own client")


async def awaits_cancelled(task: Task, ctx: Context) -> None:
    await ask(ctx)
    helper = asyncio.create_task(asyncio.sleep(60))
    helper.cancel()
    await helper


async def bad_reward(task: Task, ctx: Context) -> float:
    await ask(ctx)
    return float("nan")


def not_async(task: Task, ctx: Context) -> str:
    return ""


async def fills_the_window(task: Task, ctx: Context) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": task.payload["prompt"]}]
    while True:
        answer = await ctx.policy("policy").chat(messages)
        messages.append({"role": "assistant", "content": answer.text})


async def hides_the_full_window(task: Task, ctx: Context) -> None:
    try:
        await fills_the_window(task, ctx)
    except Exception as error:
        raise RuntimeError("what an SDK makes of it") from error


async def gives_way_then_fails(task: Task, ctx: Context) -> None:
    try:
        await fills_the_window(task, ctx)
    except Exception:
        await ask(ctx, "abc")
    raise KeyError("my own mistake")


async def ten_turns(task: Task, ctx: Context) -> float:
    """A conversation of eight turns, with two identical calls between them."""
    messages = [{"role": "user", "content": "abc>"}]
    for turn in range(8):
        if turn == 3:
            await ask(ctx, "jjj>")
            await ask(ctx, "jjj>")
        answer = await ctx.policy("policy").chat(messages)
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": "abc>"})
    return 0.5
