# SPDX-License-Identifier: Apache-2.0
"""Suites by name, on rows of the same schema as their data sets; own suites; their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dataflow.data_packages import import_datasets

from penstock.config.evaluation import SuiteConfig
from penstock.dataflow.sources.bad_rows import BadRow
from penstock.dataflow.sources.suites import KNOWN_SUITES, Suite, open_suite
from penstock.dataflow.sources.suites.suite_rows import SuiteRow, livecodebench
from penstock.errors import ConfigError
from penstock.plugins import load_function
from penstock.scorers import SCORERS

FIXTURES = Path(__file__).parent / "fixtures"
EXPECTED: dict[str, dict[str, Any]] = {
    "gsm8k": {"gsm8k-1": "14", "gsm8k-2": "2400"},
    "math500": {"test-prealgebra-1.json": r"\frac{1}{2}", "test-algebra-2.json": "-3, 3"},
    "aime24": {"60": "210", "61": "003"},
    "aime25": {"0": "120", "1": "32"},
    "amc23": {"0": "27.0", "1": "36.0"},
    "minerva": {"minerva-1": "19.6", "minerva-2": "1.5e8"},
    "olympiadbench": {"2231": "2, -2", "2233": "7"},
    "gpqa_diamond": {"recA": "B", "recB": "C"},
    "mmlu_pro": {"70": "C"},
    "arc_challenge": {"A_1": "B", "A_2": "A"},
    "humaneval": {"HumanEval-900": ""},
    "mbpp": {"901": "", "902": ""},
    "livecodebench": {"abc1": "", "abc2": ""},
    "hotpotqa": {"h1": ["Paris"], "h2": ["no"]},
    "triviaqa": {"tc_1": ["William Shakespeare", "Shakespeare"]},
    "musique": {"2hop__1_2": ["1882", "in 1882"]},
    "bamboogle": {"bamboogle-1": ["Hoover"], "bamboogle-2": ["Lausanne"]},
    "gaia": {"g-1": ["366"]},
}


def known(name: str, **options: Any) -> Suite:
    return open_suite(SuiteConfig(name=name, file=f"{name}.jsonl", **options), FIXTURES)


def own(path: Path, rows: list[dict[str, Any]], **options: Any) -> Suite:
    (path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = {"scorer": "exact", **options}
    return open_suite(SuiteConfig(name="mine", file="own.jsonl", **options), path)


def test_every_known_suite_has_a_fixture() -> None:
    assert EXPECTED.keys() == KNOWN_SUITES.keys()
    assert {one.scorer for one in KNOWN_SUITES.values()} <= {*SCORERS}


@pytest.mark.parametrize("name", EXPECTED)
def test_rows_become_questions(name: str) -> None:
    suite = known(name)
    assert {task["question"]: task["answer"] for task in suite.tasks} == EXPECTED[name]
    assert all(isinstance(task["prompt"], str) and task["prompt"] for task in suite.tasks)
    assert suite.scorer == KNOWN_SUITES[name].scorer
    assert callable(load_function(suite.reward))


@pytest.mark.parametrize("name", ["gsm8k", "olympiadbench", "mmlu_pro", "triviaqa", "gaia"])
def test_the_expected_answer_is_right_and_another_is_wrong(name: str) -> None:
    suite = known(name)
    reward = load_function(suite.reward)
    for task in suite.tasks:
        right = task["answer"] if isinstance(task["answer"], str) else task["answer"][0]
        columns = {key: [value] * 2 for key, value in task.items()}
        assert reward(completions=[f"Answer: {right}", "Answer: 999"], **columns) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("gpqa_diamond", ["Nitrogen", "Jupiter"]),
        ("arc_challenge", ["heat", "light"]),
        ("mmlu_pro", ["7"]),
    ],
)
def test_the_right_option_is_shown_under_its_letter(name: str, right: list[str]) -> None:
    tasks = known(name).tasks
    for task, text in zip(tasks, right, strict=True):
        assert f"\n{task['answer']}. {text}\n" in task["prompt"]
        assert task["choices"]["ABCDEFGHIJ".index(task["answer"])] == text


def test_the_same_questions_have_the_same_digest() -> None:
    whole, first = known("gsm8k"), known("gsm8k", limit=1)
    assert whole.digest == known("gsm8k").digest
    assert len(first.tasks) == 1
    assert len({whole.digest, first.digest, known("gsm8k", scorer="exact").digest}) == 3


def test_hidden_tests_are_not_in_the_prompt() -> None:
    humaneval, mbpp, lcb = known("humaneval"), known("mbpp"), known("livecodebench")
    assert "check" not in humaneval.tasks[0]["prompt"]
    assert "math.pi" not in mbpp.tasks[0]["prompt"]
    assert "test_1" in lcb.tasks[0]["tests"] and "'4\\n'" in lcb.tasks[0]["tests"]
    assert "Solution.total" in lcb.tasks[1]["tests"]


def test_a_folder_of_the_data_set(tmp_path: Path) -> None:
    datasets = import_datasets()
    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "it")
    suite = open_suite(SuiteConfig(name="gsm8k", file="./it"), tmp_path)
    assert [task["answer"] for task in suite.tasks] == ["2"]


def test_an_own_suite(tmp_path: Path) -> None:
    suite = own(
        tmp_path, [{"id": 7, "prompt": "a?", "answer": "b"}, {"prompt": "c?", "answer": "d"}]
    )
    assert [task["question"] for task in suite.tasks] == ["7", "mine-2"]
    assert (suite.scorer, suite.reward) == ("exact", "penstock.scorers.exact:reward")
    scored = own(tmp_path, [{"prompt": "a?"}], scorer=None, reward="my_module:score")
    assert (scored.scorer, scored.reward) == ("my_module:score", "my_module:score")


def test_a_suite_from_a_module_has_a_seed_of_its_own(tmp_path: Path) -> None:
    options: dict[str, Any] = {"reward": "penstock.tasks.reverse:reward"}
    config = SuiteConfig(name="backwards", task="penstock.tasks.reverse", limit=5, **options)
    suite = open_suite(config, tmp_path)
    assert len(suite.tasks) == 5 and suite.tasks[0]["question"] == "backwards-1"
    from penstock.tasks.reverse import make_task

    assert suite.tasks[0]["prompt"] != make_task(0, 0)["prompt"]
    as_in_training = open_suite(config.model_copy(update={"reward": None}), tmp_path)
    assert (as_in_training.scorer, as_in_training.reward) == ("", "")
    with pytest.raises(ConfigError, match="set limit to the number of questions"):
        open_suite(config.model_copy(update={"limit": None}), tmp_path)


def test_harbor_folders_are_suites(tmp_path: Path) -> None:
    for name in ("one", "two"):
        task = tmp_path / "tasks" / name
        (task / "environment").mkdir(parents=True)
        (task / "tests").mkdir()
        (task / "task.toml").write_text('version = "1.0"\n')
        (task / "instruction.md").write_text(f"Write {name}.")
        (task / "environment" / "Dockerfile").write_text("FROM python:3.12\nWORKDIR /app\n")
        (task / "tests" / "test.sh").write_text("exit 0\n")
    suite = open_suite(SuiteConfig(name="mine", harbor="tasks"), tmp_path)
    assert [task["question"] for task in suite.tasks] == ["one", "two"]
    assert (suite.scorer, suite.reward) == ("harbor", "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "gsm8"}, 'unknown suite "gsm8"; did you mean "gsm8k"'),
        ({"name": "gsm8", "reward": "a:b"}, "set file, task or harbor"),
        ({"name": "mine", "file": "x.jsonl"}, "nothing scores its answers; set scorer: math"),
        ({"name": "mine", "file": "x.jsonl", "scorer": "mth"}, 'did you mean "math"'),
        ({"name": "livecodebench"}, "download its .jsonl file and name it under file"),
        ({"name": "gsm8k", "file": "aime24.jsonl"}, r"aime24.jsonl:1.*has no part after ####"),
        ({"name": "arc_challenge", "file": "gsm8k.jsonl"}, r"gsm8k.jsonl:1: .*column choices"),
        ({"name": "gsm8k", "file": "nowhere.jsonl"}, "No such file"),
        ({"name": "mine", "harbor": "x", "scorer": "math"}, "remove scorer and reward"),
    ],
)
def test_errors_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_suite(SuiteConfig(**options), FIXTURES)
    assert str(caught.value).startswith(f"suite {options['name']!r}: ")


def test_rows_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"own.jsonl:2: answer: is missing, and the scorer exact"):
        own(tmp_path, [{"prompt": "a?", "answer": "b"}, {"prompt": "c?"}])
    with pytest.raises(ConfigError, match=r"own.jsonl:1: prompt: is missing, and the model"):
        own(tmp_path, [{"answer": "b"}])
    with pytest.raises(ConfigError, match=r"own.jsonl:1: tests: is missing, and the scorer code"):
        own(tmp_path, [{"prompt": "a?", "answer": "b"}], scorer="code")
    twice = [{"id": 7, "prompt": "a?", "answer": "b"}] * 2
    with pytest.raises(ConfigError, match=r"id '7' stands twice, at .*:1 and .*:2"):
        own(tmp_path, twice)


def test_packed_tests_of_another_kind_are_refused(tmp_path: Path) -> None:
    row = json.loads((FIXTURES / "livecodebench.jsonl").read_text().splitlines()[0])
    row["private_test_cases"] = "bm90IHppcHBlZA=="
    (tmp_path / "lcb.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=r"private_test_cases cannot be read: .*download"):
        open_suite(SuiteConfig(name="livecodebench", file="lcb.jsonl"), tmp_path)


def test_a_suite_that_is_not_here_says_which_key_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without a network, and without the data set in its cache."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def load_dataset(*args: object, **options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(import_datasets(), "load_dataset", load_dataset)
    for suite in (SuiteConfig(name="gsm8k"), SuiteConfig(name="own", file="a/b", scorer="exact")):
        with pytest.raises(ConfigError) as caught:
            open_suite(suite, Path())
        folder = "b" if suite.file else "gsm8k"
        assert f"and set the suite's file (or --suite): ./{folder}" in str(caught.value)
        assert "data.path" not in str(caught.value)


@pytest.mark.parametrize("metadata", ["[]", "{", "[" * 100_000])
def test_metadata_of_another_kind_makes_a_bad_row(metadata: str) -> None:
    values = {"question_content": "add", "metadata": metadata}
    with pytest.raises(BadRow, match="metadata is not a JSON object"):
        livecodebench(SuiteRow(values=values, place="row 1"))
