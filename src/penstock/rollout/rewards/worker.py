# SPDX-License-Identifier: Apache-2.0
"""Worker process for one reward function: `python -m penstock.rollout.rewards.worker REWARD`.

Owns the calling convention (TRL's): `reward(completions, **columns) -> list of numbers`, sync or
async. Columns are lists taken from the task payloads, plus `prompts` if payloads have a `prompt`.
A function without `**kwargs` gets only the columns it names. The node decides about failures.

Keeps imports minimal: a killed worker must restart within a tenth of a second.
"""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import Any, BinaryIO, cast

from penstock.errors import ConfigError
from penstock.plugins import REWARD_GROUP, load_function
from penstock.rollout.rewards.frames import (
    PREFIX_BYTES,
    REQUESTS,
    ScoreAnswer,
    ScoreRequest,
    frame_bytes,
    pack,
)
from penstock.rollout.user_errors import user_traceback
from penstock.types import JsonObject


def columns_of(payloads: Sequence[JsonObject]) -> dict[str, list[Any]]:
    """Transpose payloads into columns; missing keys become None."""
    names = dict.fromkeys(name for payload in payloads for name in payload)
    columns = {name: [payload.get(name) for payload in payloads] for name in names}
    if "prompt" in columns:
        columns.setdefault("prompts", columns["prompt"])
    columns.pop("completions", None)
    return columns


def select_columns(function: Callable[..., Any], columns: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return columns
    return {p.name: columns[p.name] for p in parameters if p.name in columns}


def score(function: Callable[..., Any], request: ScoreRequest) -> ScoreAnswer:
    try:
        columns = select_columns(function, columns_of(request.payloads))
        returned: Any = function(completions=request.completions, **columns)
        if inspect.isawaitable(returned):
            returned = _runner().run(_finish(returned))
        return _answer(returned, len(request.completions))
    except (Exception, SystemExit) as error:
        return ScoreAnswer(error=user_traceback(error))


async def _finish(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


@cache
def _runner() -> Any:
    """This process's single event loop, to which the function's clients may be bound."""
    import asyncio  # lazy: a third of the start-up time, and most functions are not async

    return asyncio.Runner()


def _answer(returned: Any, num_completions: int) -> ScoreAnswer:
    try:
        values = list(cast("Sequence[Any]", returned))
    except TypeError:
        return ScoreAnswer(error=f"returned {_describe(returned)} instead of a list of numbers")
    if len(values) != num_completions:
        return ScoreAnswer(
            error=f"returned {len(values)} values for {num_completions} completions; "
            "return one number per completion, in their order"
        )
    return ScoreAnswer(values=[_number(value) for value in values])


def _number(value: Any) -> float | str:
    if value is None or isinstance(value, (str, bytes)):
        return _describe(value)
    try:
        number = float(value)
    except (TypeError, ValueError):
        return _describe(value)
    except OverflowError:
        return "a number beyond every float"
    return number if math.isfinite(number) else _describe(number)


def _describe(value: Any) -> str:
    return "None" if value is None else f"{str(value)[:80]!r} ({type(value).__name__})"


def take_channel() -> tuple[BinaryIO, BinaryIO]:
    """Move the frames to private descriptors, so that `print` goes to the log and `input` gets
    EOF."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def read_request(requests: BinaryIO) -> ScoreRequest | None:
    """The next batch; None if the node has closed the pipe."""
    prefix = requests.read(PREFIX_BYTES)
    if len(prefix) < PREFIX_BYTES:
        return None
    return REQUESTS.decode(requests.read(frame_bytes(prefix)))


def main() -> None:
    requests, answers = take_channel()

    def send(answer: ScoreAnswer) -> None:
        answers.write(pack(answer))
        answers.flush()

    try:
        function = load_function(sys.argv[1], REWARD_GROUP)
    except ConfigError as error:
        send(ScoreAnswer(error=str(error)))
        return
    send(ScoreAnswer())
    while (request := read_request(requests)) is not None:
        send(score(function, request))


if __name__ == "__main__":
    main()
