# SPDX-License-Identifier: Apache-2.0
"""Sums of two numbers from 0 to 2, with letters as digits: a is 0, b is 1, … e is 4."""

import random

import penstock

DIGITS = "abcdefghij"


def make_task(ordinal: int, seed: int) -> dict[str, str]:
    first, second = random.Random(f"{seed}/{ordinal}").choices(range(3), k=2)
    return {"prompt": f"{DIGITS[first]}{DIGITS[second]}>", "answer": DIGITS[first + second]}


@penstock.reward
def reward(completion: str, answer: str) -> float:
    return float(completion.strip() == answer)
