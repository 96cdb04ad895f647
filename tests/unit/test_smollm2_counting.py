# SPDX-License-Identifier: Apache-2.0
"""recipes/smollm2_counting without its model: tasks, rewards, held-out questions, config."""

from __future__ import annotations

import json
import sqlite3
import sys
from pathlib import Path

import pytest
from recipes.smollm2_counting import counting, curve, table
from tests.unit.runs.metrics_files import run_with_metrics
from tests.unit.runs.test_broken_modules import probe_here
from tests.unit.runs.test_compare import scored, write_results

from penstock.config import load
from penstock.config.evaluation import SuiteConfig
from penstock.dataflow.sources.suites import open_suite
from penstock.runs.preflight import find_problems
from penstock.runs.target import read_target

RECIPE = Path(__file__).parents[2] / "recipes" / "smollm2_counting"


def test_no_task_is_made_of_a_held_out_start() -> None:
    num = len(counting.TRAINED)
    prompts = [counting.make_task(ordinal, 3)["prompt"] for ordinal in range(2 * num)]
    assert {counting.prompt_of(first) for first in counting.HELD_OUT}.isdisjoint(prompts)
    assert len(set(prompts[:num])) == num, "every start once in a lap"
    assert prompts[:num] != prompts[num:], "in another order in the next"
    assert len(counting.HELD_OUT) == 128 and num == 762
    assert counting.make_task(5, 3) == counting.make_task(5, 3) != counting.make_task(5, 4)


def test_every_answer_has_the_tokens_that_the_run_samples() -> None:
    """The model's tokens here: one for each digit, comma and space."""
    config = load(RECIPE / "run.yaml")
    for first in counting.TRAINED + counting.HELD_OUT:
        assert len(f" {counting.answer_of(first)}") == config.sampling.max_tokens >= 32


def test_the_suite_is_the_held_out_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["counting.py", str(tmp_path / "made.jsonl")])
    counting.main()
    assert (RECIPE / "held_out.jsonl").read_bytes() == (tmp_path / "made.jsonl").read_bytes()
    suite = SuiteConfig(name="held_out", file="held_out.jsonl", reward="counting:is_right")
    assert len(open_suite(suite, RECIPE).tasks) == 128


@pytest.mark.parametrize(
    ("text", "num_right"),
    [
        (" 105, 106, 107, 108, 109, 110, 111", 7),
        (" 105, 106, 107, 108, 109, 110, 112", 6),
        (" 105, 106, 107", 3),
        (" 105, 107, 107, 108, 109, 110, 111", 1),
        (" 105,106, 107, 108, 109, 110, 111", 1),
        (" 105\n106", 0),
        ("105, 106", 0),
        (" 106, 107", 0),
        ("", 0),
    ],
)
def test_numbers_count_up_to_the_first_wrong_one(text: str, num_right: int) -> None:
    answer = [counting.answer_of(101)]
    assert counting.reward([text], answer) == [num_right / 7]
    assert counting.is_right([text], answer) == [float(num_right == 7)]


def test_the_config_passes_check_where_neither_model_nor_vllm_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["models.policy.engine=scripted", "models.policy.init=builtin:tiny-qwen3"]
    target = read_target(RECIPE / "run.yaml", words)
    assert [*find_problems(target)] == []
    monkeypatch.setattr(sys, "path", [str(RECIPE), *sys.path])
    probed = probe_here(target)
    assert probed.problems == [] and probed.losses.keys() == {"policy"}
    assert [*probed.rewards.values()] == [0]


def test_the_table_has_both_versions_of_a_run(tmp_path: Path) -> None:
    run = run_with_metrics(tmp_path / "smollm2-counting-1", [(1, 1, 0.5)]).path
    write_results(run / "evaluations" / "local" / "policy@0.json", scored(4))
    write_results(run / "evaluations" / "local" / "policy@20.json", scored(14, 20))
    name, before, after, difference, _, flips, _ = table.row_of(run)
    assert (name, before[:5], after[:5]) == ("smollm2-counting-1", "0.200", "0.700")
    assert (difference[:7], flips) == ("+0.500 ", "10, 0")


def test_the_curve_counts_whole_answers(tmp_path: Path) -> None:
    run = tmp_path / "smollm2-counting-2"
    (run / "ledger").mkdir(parents=True)
    ledger = sqlite3.connect(run / "ledger" / "ledger.db")
    ledger.execute("CREATE TABLE rows (versions TEXT, reward FLOAT)")
    rows = [(0, 6 / 7), (0, 1.0), (1, 1.0)]
    told = [(json.dumps({"policy": [[1, number]]}), reward) for number, reward in rows]
    ledger.executemany("INSERT INTO rows VALUES (?, ?)", told)
    ledger.commit()
    ledger.close()
    found = curve.curve_of(run)
    assert found.label == "seed 2"
    assert [(point.x, point.y) for point in found.points] == [(0, 0.5), (1, 1.0)]
