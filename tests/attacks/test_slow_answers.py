# SPDX-License-Identifier: Apache-2.0
"""Answers that a model may write and that must not hold up who scores them: long runs of blanks,
lines and unclosed boxes. Limits are CPU time; the quadratic expressions of before took minutes."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from penstock.scorers import choice, exact, math
from penstock.scorers.code import program_of
from penstock.scorers.final_answer import MAX_CHARS, boxed_answers

CPU_S = 20.0
ANSWERS = {
    "blanks after the words": "the answer is" + " " * (MAX_CHARS - 100) + "\nx",
    "unclosed boxes": "\\boxed{" * (MAX_CHARS // 7),
    "stars": "the answer is" + " *" * (MAX_CHARS // 2 - 100) + "x",
    "blanks before a reason": "\\boxed{1" + " " * 3_900 + "x}",
}
SCORES: dict[str, Callable[[str], float]] = {
    "exact": lambda text: exact.score(text, "1"),
    "choice": lambda text: choice.score(text, "A"),
    "math": lambda text: math.score(text, "1"),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("scorer", SCORES)
def test_no_answer_holds_up_its_scorer(scorer: str, answer: str) -> None:
    began = time.process_time()
    assert SCORES[scorer](ANSWERS[answer]) == 0.0
    assert time.process_time() - began < CPU_S


def test_empty_lines_do_not_hold_up_the_search_for_a_function() -> None:
    began = time.process_time()
    program_of("x" + "\n" * (MAX_CHARS - 10) + "y", entry_point="solve", starter="def solve():\n")
    assert time.process_time() - began < CPU_S


def test_the_last_boxes_are_read() -> None:
    text = "\\boxed{" * 1_000 + "so \\boxed{a} and \\boxed{b}"
    assert boxed_answers(text)[-2:] == ["a", "b"]
