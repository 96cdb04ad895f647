# SPDX-License-Identifier: Apache-2.0
"""Workflows with roles and sub-agents, as users write them."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import httpx2

from penstock.errors import BudgetExceeded
from penstock.gateway.budgets import Budget
from penstock.rollout.context import Context
from penstock.types import JsonObject, Task


def said(text: str) -> list[JsonObject]:
    return [{"role": "user", "content": text}]


async def leaf(task: Task, ctx: Context) -> str:
    """Two calls, the second of which continues the first."""
    first = await ctx.policy().chat(said(task.payload["prompt"]))
    messages = [*said(task.payload["prompt"]), first.message, *said("ab>")]
    return (await ctx.policy().chat(messages)).text


async def roles(task: Task, ctx: Context) -> str:
    await ctx.policy("solver").chat(said("a>"))
    await ctx.policy("verifier").complete("b>")
    await ctx.policy("policy").chat(said("c>"))
    await ctx.policy("solver", role="critic").chat(said("d>"))
    return (await ctx.policy().chat(said("e>"))).text


async def unknown_role(task: Task, ctx: Context) -> str:
    return (await ctx.policy("solvr").chat(said("a>"))).text


async def pair(task: Task, ctx: Context) -> str:
    """Two sub-agents at once, with the same task."""
    found = await asyncio.gather(*(ctx.spawn(leaf, task.payload) for _ in range(2)))
    return "".join(found)


async def pair_in_turn(task: Task, ctx: Context) -> str:
    name = f"{__name__}:leaf"
    return "".join([await ctx.spawn(name, task.payload) for _ in range(2)])


async def middle(task: Task, ctx: Context) -> str:
    """An agent of depth 1: asks, spawns two, and asks again with what they found."""
    asked = await ctx.policy().chat(said(task.payload["prompt"]))
    found = await asyncio.gather(*(ctx.spawn(leaf, {"prompt": letter}) for letter in "ij"))
    messages = [*said(task.payload["prompt"]), asked.message, *said("".join(found))]
    ctx.reward(0.5)
    return (await ctx.policy().chat(messages)).text


async def recursive(task: Task, ctx: Context) -> str:
    asked = await ctx.policy().chat(said("a>"))
    found = await asyncio.gather(*(ctx.spawn(middle, {"prompt": letter}) for letter in "gh"))
    messages = [*said("a>"), asked.message, *said("".join(found))]
    return (await ctx.policy().chat(messages)).text


async def hands_on(task: Task, ctx: Context) -> str:
    """Its sub-agent continues its own conversation."""
    asked = await ctx.policy().chat(said("a>"))

    async def goes_on(task: Task, ctx: Context) -> str:
        return (await ctx.policy().chat([*said("a>"), asked.message, *said("b>")])).text

    return await ctx.spawn(goes_on, {})


async def returns_none(task: Task, ctx: Context) -> str:
    async def asks(task: Task, ctx: Context) -> None:
        await ctx.policy().chat(said("abc>"))

    await ctx.policy().chat(said("d>"))
    return await ctx.spawn(asks, {})


async def numbered(task: Task, ctx: Context) -> str:
    async def scores_itself(task: Task, ctx: Context) -> float:
        await ctx.policy().chat(said("b>"))
        return 0.25

    assert await ctx.spawn(scores_itself, {}) == 0.25
    return (await ctx.policy().chat(said("c>"))).text


async def endless(task: Task, ctx: Context) -> None:
    while True:
        await ctx.policy().chat(said("abcdefg>"))


async def spawns_itself(task: Task, ctx: Context) -> str:
    await ctx.policy().chat(said("a>"))
    return await ctx.spawn(spawns_itself, {})


async def waits(task: Task, ctx: Context) -> None:
    await ctx.policy().chat(said("a>"))
    await asyncio.Event().wait()


BUDGETS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tokens": (endless, {"budget": Budget(max_tokens=7)}),
    "calls": (endless, {"budget": Budget(max_calls=2)}),
    "depth": (spawns_itself, {"budget": Budget(max_depth=2)}),
    "time": (waits, {"deadline_s": 1.5}),  # its call comes first on any machine
}


async def overspends(task: Task, ctx: Context) -> str:
    """Catches what its sub-agent runs into, and says so in letters."""
    child, limits = BUDGETS[task.payload["limit"]]
    try:
        await ctx.spawn(child, {}, **limits)
    except BudgetExceeded as error:
        assert error.limit == task.payload["limit"], error
        return (await ctx.policy().chat(said("abc>"))).text
    raise AssertionError("nothing stopped the sub-agent")


async def overspends_aloud(task: Task, ctx: Context) -> None:
    child, limits = BUDGETS[task.payload["limit"]]
    await ctx.spawn(child, {}, **limits)


async def shares_a_budget(task: Task, ctx: Context) -> str:
    """What a grandchild uses is used up for its parent."""

    async def parent(task: Task, ctx: Context) -> str:
        await ctx.spawn(leaf, {"prompt": "a>"})
        return await ctx.spawn(leaf, {"prompt": "b>"})

    try:
        return await ctx.spawn(parent, {}, budget=Budget(max_calls=3))
    except BudgetExceeded as error:
        return str(error)


async def post(url: str, key: str, model: str, text: str) -> Any:
    async with httpx2.AsyncClient(timeout=60) as http:
        reply = await http.post(
            f"{url}/chat/completions",
            json={"model": model, "messages": said(text)},
            headers={"authorization": f"Bearer {key}"},
        )
        return reply.json()


async def over_http(task: Task, ctx: Context) -> str:
    """Sub-agents with clients of their own: by role in the URL, by `model`, and as a program."""
    keys: list[str] = []

    async def calls(task: Task, ctx: Context) -> str:
        keys.append(ctx.api_key)
        reply = await post(ctx.base_url, ctx.api_key, task.payload["model"], "abc>")
        return reply["choices"][0]["message"]["content"]

    await ctx.spawn(calls, {"model": "gpt-4o"}, role="solver")
    await ctx.spawn(calls, {"model": "verifier"})
    late = await post(ctx.base_url, keys[0], "solver", "abc>")
    assert late["error"]["code"] == "invalid_api_key", late
    await post(ctx.role_url("verifier"), ctx.api_key, "anything", "d>")
    return json.dumps((await post(ctx.base_url, ctx.api_key, "policy", "e>"))["model"])


PROGRAM = """
import json, os, urllib.request
own, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == own
for url in (own, json.loads(os.environ["PENSTOCK_ROLE_URLS"])["verifier"]):
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": "abc>"}]}
    headers = {"authorization": "Bearer " + key, "content-type": "application/json"}
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + "/chat/completions", data=data, headers=headers)
    urllib.request.urlopen(request).read()
"""


async def starts_a_program(task: Task, ctx: Context) -> str:
    async def starts(task: Task, ctx: Context) -> str:
        return await ctx.run_program([sys.executable, "-c", PROGRAM])

    return await ctx.spawn(starts, {}, role="solver")


async def scores(task: Task, ctx: Context) -> str:
    answer = await ctx.policy().chat(said(task.payload["prompt"]))
    ctx.reward(10 * await ctx.score(answer.text))
    return answer.text


async def configured(task: Task, ctx: Context, *, text: str = "a>", times: int = 1) -> str:
    for _ in range(times - 1):
        await ctx.policy().chat(said(text))
    return (await ctx.policy().chat(said(text))).text


async def fills_a_template(task: Task, ctx: Context) -> str:
    return (await ctx.policy().chat(said(ctx.prompt("solver", question="bc")))).text


async def fills_it_wrong(task: Task, ctx: Context) -> str:
    await ctx.policy().chat(said("a>"))
    return ctx.prompt("solver", **task.payload["values"])


async def wants_another(task: Task, ctx: Context) -> str:
    return ctx.prompt("solvr", question="a")
