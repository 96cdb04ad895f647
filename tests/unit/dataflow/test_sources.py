# SPDX-License-Identifier: Apache-2.0
"""A changed data set has another digest, as far as anybody looked."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.dataflow import numbered_tasks

from penstock.dataflow.sources import NUM_SAMPLED_TASKS, are_same_tasks, open_source, source

LIMIT = 200


def digest(limit: int | None = LIMIT) -> str:
    return open_source("train", numbered_tasks.__name__, limit=limit).digest(0)


@pytest.mark.parametrize("place", [0, NUM_SAMPLED_TASKS - 1, NUM_SAMPLED_TASKS, LIMIT - 1])
def test_a_change_up_to_the_limit_is_noticed(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    before = digest()
    assert are_same_tasks(before, digest())
    monkeypatch.setattr(numbered_tasks, "changed_from", place)
    assert not are_same_tasks(before, digest())


def test_a_change_behind_what_is_looked_at_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before, endless = digest(), digest(None)
    monkeypatch.setattr(numbered_tasks, "changed_from", LIMIT)
    assert are_same_tasks(before, digest())
    monkeypatch.setattr(numbered_tasks, "changed_from", NUM_SAMPLED_TASKS)
    assert are_same_tasks(endless, digest(None))


def test_who_looked_less_far_is_compared_by_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow module, another limit, or a run of an earlier release."""
    whole, endless = digest(), digest(None)
    monkeypatch.setattr(source, "HASH_BUDGET_S", -1.0)
    assert digest() == endless
    assert are_same_tasks(whole, endless) and are_same_tasks(endless, whole)
    monkeypatch.undo()
    assert are_same_tasks(whole, digest(LIMIT + 1))
    monkeypatch.setattr(numbered_tasks, "changed_from", NUM_SAMPLED_TASKS - 1)
    assert not are_same_tasks(whole, digest(None))
    assert not are_same_tasks(endless, digest())


def test_a_module_may_have_fewer_tasks_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbered_tasks, "num_tasks", 100)
    before = digest()
    assert are_same_tasks(before, digest())
    monkeypatch.setattr(numbered_tasks, "num_tasks", 101)
    assert not are_same_tasks(before, digest())


def test_a_file_is_looked_at_whole(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = [f'{{"prompt": "{n}"}}\n' for n in range(300)]
    path.write_text("".join(lines))
    before = open_source("train", str(path), limit=10).digest(0)
    path.write_text("".join([*lines[:-1], '{"prompt": "other"}\n']))
    assert not are_same_tasks(before, open_source("train", str(path), limit=10).digest(0))
