# SPDX-License-Identifier: Apache-2.0
"""recipes/smollm2_arithmetic without its model: tasks, reward, config, intervals, curve."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recipes.smollm2_arithmetic import arithmetic, curve
from tests.unit.runs.test_broken_modules import probe_here

from penstock.config import load
from penstock.runs.preflight import find_problems
from penstock.runs.target import read_target

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2_arithmetic"


@pytest.fixture
def evaluate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As it is started: from its own folder."""
    monkeypatch.setattr(sys, "path", [str(RECIPE), *sys.path])
    from recipes.smollm2_arithmetic import evaluate

    return evaluate


def test_no_task_is_made_of_a_held_out_problem() -> None:
    num = len(arithmetic.TRAINED)
    prompts = [arithmetic.make_task(ordinal, 3)["prompt"] for ordinal in range(2 * num)]
    assert {one.prompt for one in arithmetic.HELD_OUT}.isdisjoint(prompts)
    assert len(set(prompts[:num])) == num, "every problem once in a lap"
    assert prompts[:num] != prompts[num:], "in another order in the next"
    assert not any(one in arithmetic.SHOWN for one in arithmetic.TRAINED + arithmetic.HELD_OUT)
    assert len(arithmetic.HELD_OUT) == 200 and num == 191
    assert arithmetic.make_task(5, 3) == arithmetic.make_task(5, 3) != arithmetic.make_task(5, 4)


def test_the_right_digit_is_the_answer() -> None:
    told = {"7": 1, "8": 0, "": 0, " ": 0, "x": 0}
    assert arithmetic.reward(list(told), ["7"] * len(told)) == list(told.values())
    for problem in arithmetic.TRAINED:
        question = problem.prompt.splitlines()[-1].removesuffix(" = ")
        left, sign, right = question.split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert 0 <= value <= 9
        assert arithmetic.reward([str(value)], [problem.answer]) == [1.0]


def test_the_config_passes_check_where_neither_model_nor_vllm_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load(RECIPE / "run.yaml")
    assert config.models["policy"].engine == "vllm"
    words = ["models.policy.engine=scripted", "models.policy.init=builtin:tiny-qwen3"]
    target = read_target(RECIPE / "run.yaml", words)
    assert [*find_problems(target)] == []
    monkeypatch.setattr(sys, "path", [str(RECIPE), *sys.path])
    probed = probe_here(target)
    assert probed.problems == [] and probed.losses.keys() == {"policy"}
    assert [*probed.rewards.values()] == [0]


def test_intervals(evaluate: Any) -> None:
    """Wilson's by its definition: the ends are where the share lies 1.96 deviations away."""
    for num_right, num in [(84, 200), (0, 20), (20, 20)]:
        for end in evaluate.wilson(num_right, num):
            assert (num_right / num - end) ** 2 == pytest.approx(
                1.96**2 * end * (1 - end) / num, abs=1e-12
            )
    draw = np.random.default_rng(0).random(400)
    low, high = evaluate.bootstrap(draw.tolist())
    half_width = 1.96 * draw.std() / 20
    assert low == pytest.approx(draw.mean() - half_width, abs=0.2 * half_width)
    assert high == pytest.approx(draw.mean() + half_width, abs=0.2 * half_width)


def test_a_difference_is_paired(evaluate: Any) -> None:
    before = [evaluate.Answer(False, 0.2), evaluate.Answer(True, 0.5), evaluate.Answer(True, 0.5)]
    after = [evaluate.Answer(True, 0.6), evaluate.Answer(True, 0.5), evaluate.Answer(False, 0.4)]
    told = evaluate.difference(before, after)
    assert (told["gained"], told["lost"], told["accuracy_change"]) == (1, 1, 0.0)
    assert told["sampled_change"] == pytest.approx(0.1)


def test_the_curve_counts_all_answers_of_a_version(tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    ledger = sqlite3.connect(tmp_path / "ledger" / "ledger.db")
    ledger.execute("CREATE TABLE rows (versions TEXT, reward FLOAT)")
    rows = [(0, 0.0), (4, 1.0), (5, 1.0), (9, 1.0), (9, None)]
    told = [(json.dumps({"policy": [[1, number]]}), reward) for number, reward in rows]
    ledger.executemany("INSERT INTO rows VALUES (?, ?)", told)
    ledger.commit()
    points = curve.points_of(curve.rewards_of(tmp_path))
    assert [(point.x, point.y) for point in points] == [(0, 0.5), (5, 1.0)]
