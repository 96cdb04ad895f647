# SPDX-License-Identifier: Apache-2.0
"""Write three letters backwards: small enough to learn on a CPU in two minutes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

LETTERS = "abcdefghij"


def make_task(ordinal: int, seed: int) -> dict[str, Any]:
    """Task number `ordinal` of the endless stream for `seed`."""
    letters = "".join(random.Random(f"{seed}/{ordinal}").choices(LETTERS, k=3))
    return {"prompt": f"{letters}>", "answer": letters[::-1]}


def reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """Share of correct positions."""
    return [
        sum(a == b for a, b in zip(text, truth, strict=False)) / len(truth)
        for text, truth in zip(completions, answer, strict=True)
    ]
