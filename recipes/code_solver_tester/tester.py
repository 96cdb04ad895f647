# SPDX-License-Identifier: Apache-2.0
"""A solver writes a program; a tester writes a test for the same task, without seeing the program.

The solver earns 1 if its outputs are right. The tester earns nothing if its test fails on the right
program, else the share of wrong programs that fail it: a test that all programs pass earns nothing.
Wrong programs are the one of the task, and the solver's if it is wrong.
"""

import json

import programs

import penstock


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def run(task: penstock.Task, ctx: penstock.Context) -> None:
    question = user(task.payload["prompt"])
    draft = await ctx.policy("solver").chat([question], max_tokens=1)
    test = await ctx.policy("tester").chat([question], max_tokens=2)
    printed = await execute(ctx, programs.program(draft.text) + programs.prints())
    is_right = printed == json.dumps(task.payload["outputs"])
    wrong = [task.payload["wrong"]] + ([] if is_right else [draft.text])
    ctx.reward(float(is_right), role="solver")
    ctx.reward(await separates(ctx, test.text, task.payload["right"], wrong), role="tester")
    ctx.reward(float(is_right))


async def separates(ctx: penstock.Context, test: str, right: str, wrong: list[str]) -> float:
    """The share of wrong programs that fail a test which the right one passes."""
    source = programs.test(test)
    if await execute(ctx, programs.program(right) + source) is None:
        return 0.0
    failed = [await execute(ctx, programs.program(text) + source) is None for text in wrong]
    return sum(failed) / len(failed)


async def execute(ctx: penstock.Context, source: str) -> str | None:
    """What a program prints in the sandbox of this attempt; None if it fails."""
    await ctx.sandbox.put("program.py", source.encode(errors="replace"))
    done = await ctx.sandbox.exec(["python3", "-I", "program.py"], timeout_s=20.0)
    return done.stdout.strip() if done.code == 0 else None
