# SPDX-License-Identifier: Apache-2.0
"""`penstock solve`: watch an agent work on one question."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runs.eval_target import EvalTarget
    from penstock.types import JsonObject, Trajectory


def solve(
    question: str,
    /,
    *,
    run: Path,
    version: int | None = None,
    policy: str | None = None,
    source: str | None = None,
    answer: str | None = None,
    base_url: str | None = None,
    model: str | None = None,
    json: bool = False,
) -> int:
    """Watch an agent work on one question, through the workflow and the tools of a run.

    Nothing is kept. Exits with 0 if the agent came to an end.

    Args:
        question: What the agent is asked: the prompt of the task.
        run: Run folder; or config file, for the initial weights.
        version: Version of the run; by default the newest.
        policy: Policy of a run that trains several.
        source: Source whose workflow, tools and sampling are used; by default the first.
        answer: The expected answer, for a reward that compares with it.
        base_url: OpenAI-compatible server that answers instead of the policy's engine, such as
            http://127.0.0.1:8000/v1. Its key is read from OPENAI_API_KEY.
        model: Model name at that server; by default the name of the policy.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.cli.solve_lines import ending_lines, is_failure
    from penstock.observe import logs
    from penstock.runs.eval_target import read_eval_target
    from penstock.runs.local_gateway import TextServerAddress
    from penstock.runs.solve import question_payload

    logs.configure("solve", level="critical")
    target = read_eval_target(str(run), version=version, policy=policy)
    if base_url is not None:
        key = os.environ.get("OPENAI_API_KEY", "")
        name = model or target.policy
        server = TextServerAddress(base_url=base_url, model=name, api_key=key)
        target = replace(target, server=server)
    elif target.weights is not None:
        print_note(f"loading {target.weights.place}")
    payload = question_payload(question, answer)
    ended = asyncio.run(_watch(target, payload, source, is_shown=not json))
    if json:
        print_json(_report(ended, target))
    else:
        print_text("\n".join(ending_lines(ended, has_answer=answer is not None)))
    return 1 if is_failure(ended, has_answer=answer is not None) else 0


async def _watch(
    target: EvalTarget, payload: JsonObject, source: str | None, *, is_shown: bool
) -> Trajectory:
    from penstock.cli.solve_lines import EventWriter
    from penstock.runs.solve import SolveEvent, solve

    writer = EventWriter(sys.stdout)
    ended: Trajectory | None = None
    async with aclosing(solve(target, payload, source)) as events:
        async for event in events:
            if not isinstance(event, SolveEvent):
                ended = event
            elif is_shown:
                writer.write(event)
    assert ended is not None, "the last event is the trajectory"
    return ended


def _report(ended: Trajectory, target: EvalTarget) -> dict[str, object]:
    from penstock.types import view_ids

    return {
        "version": f"{target.policy}@{target.version}",
        "outcome": ended.outcome,
        "reward": ended.reward,
        "turns": len(ended.turns),
        "tokens": sum(len(view_ids(turn.sampled_ids)) for turn in ended.turns),
        "tool_uses": ended.tool_uses,
        "seconds": ended.ended_at - ended.started_at,
    }
