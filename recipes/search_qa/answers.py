# SPDX-License-Identifier: Apache-2.0
"""The reward of an answer: 1 if it is the letter of the fact, else 0."""

from collections.abc import Sequence
from typing import Any


def reward(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]
