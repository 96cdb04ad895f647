# SPDX-License-Identifier: Apache-2.0
"""A writer drafts, an editor rewrites: two models, each with its own reward. Change all of it.

The tiny built-in model knows the letters a to j and the character `>`; one letter is one token.
"""

from typing import Any

LETTERS = "abcd"


def make_task(ordinal: int, seed: int) -> dict[str, Any]:
    """Problem number `ordinal`: write a letter twice."""
    letter = LETTERS[(ordinal + seed) % len(LETTERS)]
    return {"prompt": f"{letter}>", "answer": 2 * letter}


def share_right(text: str, answer: str) -> float:
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


async def run(task: Any, ctx: Any) -> None:
    """`roles` in run.yaml says which model writes and which one edits."""
    prompt, answer = task.payload["prompt"], task.payload["answer"]
    draft = await ctx.policy("writer").chat([{"role": "user", "content": prompt}])
    edited = await ctx.policy("editor").chat([{"role": "user", "content": f"{draft.text}{prompt}"}])
    ctx.reward(share_right(draft.text, answer), role="writer")
    ctx.reward(share_right(edited.text, answer), role="editor")
    ctx.reward(share_right(edited.text, answer))  # of the row: what the two deliver together
