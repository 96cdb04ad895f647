# SPDX-License-Identifier: Apache-2.0
"""The game of the fake bridge, on `bridges/serving.py`, whose folder is the first argument. Prints
on standard output, as libraries do, and writes each episode that it closes to the second one."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

TOOL = {"type": "function", "function": {"name": "down", "parameters": {"type": "object"}}}


class Countdown:
    def __init__(self) -> None:
        self.left = 0

    def reset(self, payload: dict[str, Any], seed: int, model: dict[str, Any]) -> dict[str, Any]:
        print(f"seed {seed}")
        self.left = int(payload.get("from", 2))
        return {"text": f"{self.left} left", "tools": [TOOL]}

    def step(self, text: str, tool_calls: list[dict[str, Any]]) -> dict[str, Any]:
        if text == "hang":
            threading.Event().wait()
        if text == "raise":
            raise ValueError("the world is broken")
        if text == "exit":
            sys.exit("the world gave up")
        calls = [one["name"] for one in tool_calls]
        self.left -= text.strip() == "down" or "down" in calls
        is_over = self.left <= 0
        return {"text": f"{self.left} left", "done": is_over, "reward": float(is_over)}

    def score(self) -> float:
        return float(self.left <= 0)

    def close(self) -> None:
        if len(sys.argv) > 2:
            with open(sys.argv[2], "a") as file:
                print("closed", file=file)


def load(settings: dict[str, Any]) -> Callable[[], Countdown]:
    return Countdown


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    import_module("serving").serve(load)
