# SPDX-License-Identifier: Apache-2.0
"""Scorers against cases labelled by hand: at least 100 each, 99 % agree, and the rest is listed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.graded import GradedScorer
from penstock.scorers import choice, exact, math
from penstock.scorers.code import assert_tests
from penstock.scorers.judge import judged
from penstock.types import Task

CASES = Path(__file__).parent / "cases"
DISAGREEMENTS = {
    # A sum to 999,999,999 is not evaluated: its bound looks like a power that takes for ever.
    "math": [r"\boxed{\sum_{k=1}^{999999999} k}"],
    # Only English marks a final answer.
    "exact": ["答案: 北京"],
    # Whoever names two letters is wrong, also where one is denied.
    "choice": ["It is not B, it is C"],
    "code": [],
    "judge": [],
}


def read_cases(scorer: str) -> list[dict[str, Any]]:
    lines = (CASES / f"{scorer}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def check_agreement(scorer: str, wrongly_scored: list[str], num_cases: int) -> None:
    assert wrongly_scored == DISAGREEMENTS[scorer]
    assert num_cases >= 100 and len(wrongly_scored) <= 0.01 * num_cases


@pytest.mark.parametrize("module", [exact, choice, math], ids=["exact", "choice", "math"])
def test_scorers_agree_with_people(module: Any) -> None:
    name = module.__name__.rpartition(".")[2]
    cases = read_cases(name)
    check_agreement(name, list(_disagreements(module, cases)), len(cases))


def _disagreements(module: Any, cases: list[dict[str, Any]]) -> Iterator[str]:
    for case in cases:
        options = {"choices": case["choices"]} if "choices" in case else {}
        found = module.score(case["answer"], case["expected"], **options)
        assert found in (0.0, 1.0)
        if bool(found) is not case["right"]:
            yield case["answer"]


async def test_a_judge_gives_a_point_only_for_a_clear_verdict() -> None:
    cases = read_cases("judge")
    wrongly_scored = [one["reply"] for one in cases if await _judge_says(one) is not one["right"]]
    check_agreement("judge", wrongly_scored, len(cases))


async def _judge_says(case: dict[str, Any]) -> bool:
    async def ask(message: str) -> str:
        nonce = message.rpartition('{"id": "')[2].partition('"')[0]
        return case["reply"].replace("NONCE", nonce)

    return bool(await judged(ask, question="2 + 3?", answer="5", expected="5"))


def _needs_sandbox() -> None:
    if not os.path.exists("/usr/bin/bwrap"):
        pytest.skip("needs bubblewrap")


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_code_agrees_with_people() -> None:
    _needs_sandbox()
    cases = read_cases("code")
    scores = await _grade(cases)
    wrongly_scored = [
        case["answer"]
        for case, found in zip(cases, scores, strict=True)
        if found != float(case["right"])
    ]
    check_agreement("code", wrongly_scored, len(cases))


@pytest.mark.parametrize("number", [1, 15, 39])
async def test_some_code_agrees_with_people(number: int) -> None:
    _needs_sandbox()
    case = read_cases("code")[number]
    assert await _grade([case]) == [float(case["right"])]


async def _grade(cases: list[dict[str, Any]]) -> list[Any]:
    scorer = GradedScorer(Isolation())
    tasks = (_code_task(case) for case in cases)
    pairs = zip(cases, tasks, strict=True)
    return await asyncio.gather(*(scorer.score(case["answer"], task) for case, task in pairs))


def _code_task(case: dict[str, Any]) -> Task:
    payload = {"tests": assert_tests(case["tests"], case.get("setup", ""))}
    return Task(key="k", source="s", ordinal=0, payload=payload, workflow="", seed=0)
