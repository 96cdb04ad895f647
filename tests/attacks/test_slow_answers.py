# SPDX-License-Identifier: Apache-2.0
"""Answers that a model may write and that must not hold up who scores them: long runs of blanks,
lines and unclosed boxes. Limits are CPU time; the quadratic expressions of before took minutes."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.scorers import choice, exact, math
from penstock.scorers.code import program_of
from penstock.scorers.final_answer import MAX_CHARS, boxed_answers
from penstock.trainer.prm.step_text import scored_texts, step_text
from penstock.trainer.prm.traces import Step, Trace, read_lines

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


@pytest.mark.parametrize(
    "answer",
    [
        r"so $(x+y)^{9}$ hence $(x+y)^{8}\%$",
        r"\boxed{(x+y)^{9}\%}",
    ],
)
def test_an_answer_has_one_budget_whatever_it_is_compared_with(
    answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comparison had five seconds: a row of two formulas and a percent sign took twelve."""
    limits: list[float] = []
    compared: list[str] = []
    real_timer, real_verify = signal.setitimer, vars(math)["_verify"]

    def setitimer(which: int, seconds: float, interval: float = 0.0) -> tuple[float, float]:
        limits.append(seconds)
        return real_timer(which, seconds, interval)

    def verify(wanted: str, found: str) -> bool:
        compared.append(found)
        return real_verify(wanted, found)

    monkeypatch.setattr(signal, "setitimer", setitimer)
    monkeypatch.setattr(math, "_verify", verify)
    assert math.score(answer, "42") == 0.0
    assert len(compared) > 1
    assert limits == [math.MAX_CPU_S, 0]


def test_an_answer_that_has_used_its_budget_is_not_compared_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []

    def verify(wanted: str, found: str) -> bool:
        compared.append(found)
        began = time.process_time()
        while time.process_time() - began < 1.0:
            pass
        return False

    monkeypatch.setattr(math, "MAX_CPU_S", 0.01)
    monkeypatch.setattr(math, "_verify", verify)
    assert math.score(r"\boxed{7\%}", "42") == 0.0
    assert len(compared) == 1


def test_empty_lines_do_not_hold_up_the_search_for_a_function() -> None:
    began = time.process_time()
    program_of("x" + "\n" * (MAX_CHARS - 10) + "y", entry_point="solve", starter="def solve():\n")
    assert time.process_time() - began < CPU_S


@pytest.mark.parametrize("text", ["```" + " " * MAX_CHARS, "``` a" + "\t " * (MAX_CHARS // 3)])
def test_blanks_do_not_hold_up_the_search_for_a_program(text: str) -> None:
    """The node itself searches: it would serve no other attempt meanwhile."""
    began = time.process_time()
    assert program_of(text[:MAX_CHARS]).startswith("```")
    assert time.process_time() - began < CPU_S


def test_many_turns_do_not_hold_up_the_texts_of_steps() -> None:
    """A node delivers as many turns as a row may have, one after the other: the stage that rates
    them goes on."""
    num_turns = 2_000
    steps = [Step(prompt="p" * 20, action="a" * 20, parent=at - 1) for at in range(num_turns)]
    began = time.process_time()
    texts = scored_texts(steps)
    assert time.process_time() - began < CPU_S
    assert len(texts) == num_turns and texts[1] == step_text(steps[:2], 1)


@pytest.mark.parametrize("parent", [1, 0, 5, -2])
def test_a_trace_cannot_lead_in_a_circle(tmp_path: Path, parent: int) -> None:
    """Traces are files that people share; the context of a step is found by its parents."""
    path = tmp_path / "traces.jsonl"
    step = {"prompt": "p", "action": "a", "parent": parent}
    trace: dict[str, Any] = {
        "row": "r",
        "group": "g",
        "task": {},
        "outcome": "completed",
        "reward": 1.0,
    }
    path.write_text(json.dumps({**trace, "steps": [step, step]}))
    with pytest.raises(ConfigError, match=r"line 1: .*parent"):
        list(read_lines(path, Trace))


def test_the_last_boxes_are_read() -> None:
    text = "\\boxed{" * 1_000 + "so \\boxed{a} and \\boxed{b}"
    assert boxed_answers(text)[-2:] == ["a", "b"]
