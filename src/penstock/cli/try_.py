# SPDX-License-Identifier: Apache-2.0
"""`penstock try`: a few rollouts without training."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from penstock.cli.output import pluralise, print_json, print_note, print_text, printable

if TYPE_CHECKING:
    from penstock.runs.local_gateway import TextServerAddress
    from penstock.runs.target import RunTarget
    from penstock.runs.try_rollouts import TriedRollout
    from penstock.types import JsonObject


def try_(
    target: Path,
    /,
    *overrides: str,
    count: Annotated[int, Parameter(alias="-n")] = 5,
    base_url: str | None = None,
    model: str | None = None,
    json: bool = False,
) -> int:
    """Make a few rollouts without training, and print them with their rewards.

    Nothing is kept. Exits with 0 if at least one rollout was scored.

    Args:
        target: Config file, to try the initial weights; or run folder, to try its newest
            checkpoint.
        overrides: Settings that override the file, such as sampling.max_tokens=64.
        count: Number of rollouts.
        base_url: OpenAI-compatible server that answers instead of the policy's engine, such as
            http://127.0.0.1:8000/v1. Its key is read from OPENAI_API_KEY.
        model: Model name at that server; by default the name of the policy.
        json: Print one JSON object as the last line.
    """
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.runs.local_gateway import TextServerAddress
    from penstock.runs.target import read_target

    if count < 1:
        raise ConfigError(f"--count {count}: must be 1 or more")
    logs.configure("try", level="error")
    resolved = read_target(target, overrides)
    server = None
    if base_url is not None:
        name = model or next(iter(resolved.config.models))
        key = os.environ.get("OPENAI_API_KEY", "")
        server = TextServerAddress(base_url=base_url, model=name, api_key=key)
    elif model is not None:
        raise ConfigError("--model names a model of a server; give --base-url too")
    tried = asyncio.run(_try_and_show(resolved, count, server, is_shown=not json))
    scored = [rollout.reward for rollout in tried if rollout.reward is not None]
    mean = sum(scored) / len(scored) if scored else None
    if json:
        print_json({"rollouts": tried, "scored": len(scored), "reward": mean})
    else:
        score = f", mean reward {mean:.3g}" if mean is not None else ""
        print_text(f"{len(scored)} of {pluralise(len(tried), 'rollout')} scored{score}")
    return 0 if scored else 1


async def _try_and_show(
    target: RunTarget, count: int, server: TextServerAddress | None, *, is_shown: bool
) -> list[TriedRollout]:
    from penstock.runs.chosen_weights import newest_checkpoint_or_init
    from penstock.runs.try_rollouts import try_rollouts

    if server is None:
        for name in target.config.models:
            print_note(f"loading {newest_checkpoint_or_init(target, name).place}")
    tried: list[TriedRollout] = []
    async for rollout in try_rollouts(target, count, server):
        tried.append(rollout)
        if is_shown:
            _print_rollout(len(tried), rollout)
    return tried


def _print_rollout(number: int, rollout: TriedRollout) -> None:
    score = "no reward" if rollout.reward is None else f"reward {rollout.reward:g}"
    how = rollout.outcome + (f" ({rollout.reason})" if rollout.reason else "")
    print_text(f"--- {number}. task {rollout.ordinal} of {rollout.source}: {score}, {how}")
    for message in rollout.messages:
        _print_message(message)
    if rollout.detail:
        print_text("\n".join(f"  ! {line}" for line in printable(rollout.detail).splitlines()))
    print_text()


def _print_message(message: JsonObject) -> None:
    content = message.get("content")
    lines = str(content).splitlines() if content else []
    calls = [
        f"{call['function']['name']}({call['function']['arguments']})"
        for call in message.get("tool_calls") or ()
    ]
    for index, line in enumerate([*lines, *calls] or [""]):
        print_text(f"  {message['role'] if index == 0 else '':>9}  {line}")
