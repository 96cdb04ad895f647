# SPDX-License-Identifier: Apache-2.0
"""Runs a program as the workflow: it reads the task, calls the model over HTTP, and prints its
completion.

The task payload is passed as JSON in PENSTOCK_TASK and on standard input, the slot's seed in
PENSTOCK_SEED. OPENAI_BASE_URL and OPENAI_API_KEY point to the model, as do ANTHROPIC_BASE_URL and
ANTHROPIC_API_KEY. The last printed line is the completion for the reward function; if the program
prints nothing, it is the text of the last model answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from penstock.rollout.context import Context
from penstock.types import Task
from penstock.wire.codec import encode_json

MAX_ENV_BYTES = 100_000
"""Linux allows at most 128 KiB per variable; a larger task is only on standard input."""


def command(argv: Sequence[str]) -> Callable[[Task, Context], Awaitable[str | None]]:
    async def run(task: Task, ctx: Context) -> str | None:
        payload = encode_json(task.payload)
        env = {"PENSTOCK_SEED": str(ctx.seed)}
        if len(payload) <= MAX_ENV_BYTES:
            env["PENSTOCK_TASK"] = payload.decode()
        printed = await ctx.run_program(argv, env=env, stdin=payload)
        return printed.splitlines()[-1] if printed else None

    return run
