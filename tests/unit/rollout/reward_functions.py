# SPDX-License-Identifier: Apache-2.0
"""Good and bad reward functions; the text of a completion selects the behavior."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

BABBLE = "x" * (10 << 20)


def mixed(completions: Sequence[str], **_: Any) -> list[Any]:
    return [one(text) for text in completions]


def one(text: str) -> Any:
    match text:
        case "hang":
            while True:
                signal.pause()
        case "raise":
            raise RuntimeError("the grader is out of ink")
        case "abort":
            os.abort()
        case "exit":
            sys.exit(3)
        case "print":
            print(BABBLE)
            os.write(1, b"\xff\xff\xff\xff raw bytes on standard output")
        case "none":
            return None
        case "nan":
            return float("nan")
        case "text":
            return "0.5"
        case "read":
            return float(len(sys.stdin.read()))
        case _:
            pass
    return float(len(text))


async def awaited(completions: list[str], answer: list[str]) -> list[float]:
    """Async, without **kwargs: gets only the columns it names."""
    await asyncio.sleep(0)
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]


def trl(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    assert kwargs["answer"] and kwargs["prompt"] == prompts
    return [float(len(prompt)) for prompt in prompts]


def too_few(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * (len(completions) - 1)


def no_list(completions: list[str], **_: Any) -> float:
    return 1.0


def leaves_a_child(completions: list[str], **_: Any) -> list[float]:
    with subprocess.Popen(["sleep", "300"]):
        return [1.0] * len(completions)
