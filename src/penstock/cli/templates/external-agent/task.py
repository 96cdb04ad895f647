# SPDX-License-Identifier: Apache-2.0
"""The problem to learn and its reward: write a letter three times. Change both for yours."""

from typing import Any

LETTERS = "ab"


def make_task(ordinal: int, seed: int) -> dict[str, Any]:
    """Problem number `ordinal`; the agent gets it as JSON."""
    letter = LETTERS[ordinal % len(LETTERS)]
    return {"prompt": f"{letter}>", "answer": 3 * letter}


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """One number per completion: the share of letters in the right place."""
    return [
        sum(a == b for a, b in zip(text, truth, strict=False)) / len(truth)
        for text, truth in zip(completions, answer, strict=True)
    ]
