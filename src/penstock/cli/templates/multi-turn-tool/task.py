# SPDX-License-Identifier: Apache-2.0
"""A tool tells a letter; the model must pass it on. The tiny model knows the letters a to j."""

import random
from typing import Any

LETTERS = "abcd"


def make_task(ordinal: int, seed: int) -> dict[str, Any]:
    return {"letter": random.Random(f"{seed}/{ordinal}").choice(LETTERS)}


def tool(call: str, letter: str) -> str:
    """Tells the letter, whatever it is asked."""
    return f"{letter}>"


async def run(task: Any, ctx: Any) -> float:
    """Two turns: a call of the tool, then the answer."""
    letter, messages = task.payload["letter"], [{"role": "user", "content": ">"}]
    call = await ctx.policy().chat(messages)
    messages.append({"role": "assistant", "content": call.text})
    messages.append({"role": "user", "content": tool(call.text, letter)})
    answer = await ctx.policy().chat(messages)
    return float(answer.text == letter)
