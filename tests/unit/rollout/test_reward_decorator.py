# SPDX-License-Identifier: Apache-2.0
"""`@penstock.reward`: one completion in, one number out, and a run calls it with batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import penstock
from penstock.rollout.rewards.frames import ScoreAnswer, ScoreRequest
from penstock.rollout.rewards.worker import score
from penstock.types import JsonObject


def scored(function: Callable[..., Any], *payloads: JsonObject) -> ScoreAnswer:
    """As a worker calls it, with the completions a, b, c, …"""
    completions = [chr(ord("a") + at) for at in range(len(payloads))]
    return score(function, ScoreRequest(completions=completions, payloads=list(payloads)))


@penstock.reward
def exact(completion: str, answer: str, bonus: float = 0.0) -> float:
    """Right or wrong."""
    return float(completion == answer) + bonus


def test_a_run_calls_it_with_a_batch_and_you_with_one() -> None:
    answer = scored(exact, {"answer": "a", "prompt": "p"}, {"answer": "x", "prompt": "p"})
    assert answer == ScoreAnswer(values=[1.0, 0.0])
    assert exact("a", "a") == 1.0 and exact("a", answer="b", bonus=2.0) == 2.0
    assert (exact.__name__, exact.__doc__) == ("exact", "Right or wrong.")


def test_a_default_is_used_where_no_task_has_the_column() -> None:
    assert scored(exact, {"answer": "a", "bonus": 0.5}).values == [1.5]


def test_the_whole_task_and_a_column_of_that_name() -> None:
    @penstock.reward
    def by_task(completion: str, task: Any) -> float:
        return float(len(task))

    assert scored(by_task, {"prompt": "p", "answer": 1}).values == [2.0]
    assert scored(by_task, {"task": "seven!!"}).values == [7.0], "a column goes first"


def test_async_functions_score_concurrently() -> None:
    arrived = asyncio.Barrier(3)

    @penstock.reward
    async def judged(completion: str) -> float:
        await asyncio.wait_for(arrived.wait(), 60)
        return float(ord(completion))

    assert scored(judged, {}, {}, {}).values == [97.0, 98.0, 99.0]


def test_a_parameter_that_the_task_lacks_is_named_with_what_there_is() -> None:
    found = scored(exact, {"question": "q", "prompt": "p"}).error
    assert "reward exact takes 'answer'" in found and "only question, prompt" in found
    assert "rename the parameter, add the column to the tasks, or give the parameter" in found


def of_nothing(text: str) -> float:
    return 0.0


def of_lists(completions: list[str], **columns: list[Any]) -> list[float]:
    return [0.0]


def of_any_column(completion: str, **columns: Any) -> float:
    return 0.0


def of_unnamed(completion: str, *more: Any) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (of_nothing, "has no parameter `completion`"),
        (of_lists, "remove @penstock.reward"),
        (of_any_column, r"takes \*\*columns, .* take `task`"),
        (of_unnamed, r"takes \*more, .* take `task`"),
    ],
)
def test_a_function_of_another_shape_is_refused_where_it_stands(
    function: Callable[..., Any], says: str
) -> None:
    with pytest.raises(TypeError, match=says):
        penstock.reward(function)


def test_a_value_that_is_no_number_is_described() -> None:
    @penstock.reward
    def nothing(completion: str) -> Any:
        return None

    assert scored(nothing, {}).values == ["None"]

    @penstock.reward
    def huge(completion: str) -> Any:
        return 10**5000

    assert scored(huge, {}).values == ["a number beyond every float"]
