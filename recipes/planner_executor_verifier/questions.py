# SPDX-License-Identifier: Apache-2.0
"""Questions that a tiny model can answer: a letter, whose answer is the letter itself."""

import random
from collections.abc import Sequence
from typing import Any

LETTERS = "ABCD"


def make_task(ordinal: int, seed: int) -> dict[str, str]:
    letter = random.Random(f"{seed}/{ordinal}").choice(LETTERS)
    return {"prompt": letter, "answer": letter}


def reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """1 for the right letter, and a little for any letter at all."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if text == truth else 0.2 * (text in set(LETTERS)) for text, truth in pairs]
