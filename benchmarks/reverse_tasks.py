# SPDX-License-Identifier: Apache-2.0
"""A task set of mixed difficulty for a small language model.

Every task asks for three letters backwards; it is solved when its first one, two or three letters
are right. The first kind is solved soon, the last is out of reach for long, so at any time many
groups have no spread."""

from __future__ import annotations

from penstock.tasks import reverse
from penstock.types import JsonObject

NUM_TASKS = 192


def make_tasks(seed: int) -> list[JsonObject]:
    return [
        {**reverse.make_task(ordinal, seed), "num_letters": 1 + ordinal % 3}
        for ordinal in range(NUM_TASKS)
    ]


def is_solved(text: str, task: JsonObject) -> bool:
    num_letters: int = task["num_letters"]
    return text[:num_letters] == task["answer"][:num_letters]
