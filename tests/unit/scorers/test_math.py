# SPDX-License-Identifier: Apache-2.0
"""What the scorer `math` refuses to evaluate, and how it ends what takes too long."""

from __future__ import annotations

import threading

import pytest

from penstock.scorers import math
from penstock.scorers.math import is_costly, reward, score

SLOW = r"\boxed{\sin(x)^4+\cos(x)^4+2\sin(x)^2\cos(x)^2}"
"""Equal to 1, which takes about half a second of CPU time to find."""


@pytest.mark.parametrize(
    "text",
    ["9^9^9", "9^{9^{9}}", "10^{100000}", "9" * 300, "(" * 31 + ")" * 31, "(9!)!", "1001!"],
)
def test_what_could_take_for_ever_is_not_evaluated(text: str) -> None:
    assert is_costly(text)


@pytest.mark.parametrize("text", ["2^{2023}", "2^3x^2", "x^{2}y^{3}", "20!", r"\frac{1}{10^{9}}"])
def test_what_answers_usually_have_is_evaluated(text: str) -> None:
    assert not is_costly(text)


def test_a_comparison_ends_when_its_cpu_time_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    score(r"\boxed{1/2}", "0.5")  # loads the library
    monkeypatch.setattr(math, "MAX_CPU_S", 0.01)
    assert score(SLOW, "1") == 0.0
    monkeypatch.setattr(math, "MAX_CPU_S", 60.0)
    assert score(SLOW, "1") == 1.0


def test_other_threads_can_score_too() -> None:
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(score(r"\boxed{\frac{1}{2}}", "0.5")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_as_a_reward() -> None:
    assert reward([r"\boxed{5}", "6"], answer=["5", 5], prompt=["?", "?"]) == [1.0, 0.0]
