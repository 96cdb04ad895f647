# SPDX-License-Identifier: Apache-2.0
"""Notes of `penstock check` about training data that repeats evaluation questions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config import RunConfig
from penstock.config.evaluation import SuiteConfig
from penstock.runs.leakage_check import LeakBounds, leakage_notes, prompt_text
from penstock.runs.target import read_target

ENDING = " Think step by step."
QUESTIONS = (
    "Mia has 12 apples and buys 7 more at the market. How many apples does she have now?",
    "A train goes 60 km in 2 hours and stops for 5 minutes. How fast is it on the way?",
    "Which river flows through the largest city of Peru and ends in the sea?",
)
ROWS = (
    "Tom sells 3 of his 9 pens to Ana. How many pens does Tom keep?",
    QUESTIONS[0].upper(),
    "Which river flows through the largest city of Kenya and ends in the sea?",
    "Name a colour that is in every flag of the north.",
)
RUN = """
name: x
models: {policy: {init: "builtin:tiny-qwen3"}}
reward: "penstock.tasks.reverse:reward"
sources:
  - {name: train, data: train.jsonl}
  - {name: made, task: penstock.tasks.reverse}
training: {steps: 1}
"""
SUITE = SuiteConfig(name="held_out", file="questions.jsonl", scorer="exact")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "questions.jsonl", QUESTIONS, "")
    write(tmp_path / "train.jsonl", ROWS, ENDING)
    (tmp_path / "run.yaml").write_text(RUN)
    return read_target(tmp_path / "run.yaml", ()).config


def write(path: Path, texts: tuple[str, ...], ending: str) -> None:
    rows = [{"prompt": text + ending, "answer": "x"} for text in texts]
    path.write_text("\n".join(map(json.dumps, rows)))


def test_pairs_are_named(config: RunConfig) -> None:
    [note] = leakage_notes(config, [SUITE])
    assert note.startswith("source train: 1 of 4 tasks repeat questions of suite held_out: ")
    assert "train.jsonl:2 = held_out-1 (exact); remove them" in note


def test_without_suites_nothing_is_read(config: RunConfig) -> None:
    assert list(leakage_notes(config, [])) == []


def test_rows_beyond_the_bounds_are_counted(config: RunConfig) -> None:
    [note] = leakage_notes(config, [SUITE], LeakBounds(max_rows=1, budget_s=None))
    assert note.startswith("source train: 1 of 4 tasks were compared") and "--all-rows" in note
    [late] = leakage_notes(config, [SUITE], LeakBounds(budget_s=0.0))
    assert late.startswith("source train: 0 of 4 tasks were compared")


def test_a_suite_that_cannot_be_opened_is_a_note(config: RunConfig) -> None:
    missing = SuiteConfig(name="held_out", file="nowhere.jsonl", scorer="exact")
    [note] = leakage_notes(config, [missing])
    assert note.startswith("not compared with the training data: suite 'held_out': ")


def test_of_a_conversation_the_user_counts() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert (prompt_text(messages), prompt_text("c"), prompt_text(None)) == ("b", "c", "")
