# SPDX-License-Identifier: Apache-2.0
"""The problem to learn and its reward. Change both for your own task.

The tiny built-in model knows the letters a to j and the character `>`; one letter is one token.
"""

import random
from typing import Any

LETTERS = "abcdefghij"


def make_task(ordinal: int, seed: int) -> dict[str, Any]:
    """Problem number `ordinal`. The same arguments must always return the same problem.

    The model gets `prompt`; the reward gets all other keys."""
    letters = "".join(random.Random(f"{seed}/{ordinal}").choices(LETTERS, k=3))
    return {"prompt": f"{letters}>", "answer": letters[::-1]}


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """One number per completion: the share of letters in the right place."""
    return [
        sum(a == b for a, b in zip(text, truth, strict=False)) / len(truth)
        for text, truth in zip(completions, answer, strict=True)
    ]
