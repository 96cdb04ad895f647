# SPDX-License-Identifier: Apache-2.0
"""What `penstock check` says about Harbor tasks before a run starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from penstock.config import RunConfig, load
from penstock.runs.data_check import data_problems
from penstock.runs.isolation_check import isolation_problems
from penstock.runs.sandbox_settings import isolation_settings

TASKS = Path(__file__).parents[2] / "harbor_tasks"
RUN = """
name: harbor
models: {policy: {init: "builtin:tiny-qwen3"}}
sources: [{name: shell, harbor: tasks}]
training: {learning_rate: 1.0e-3, groups_per_batch: 1, steps: 1}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(TASKS / "hello-file", tmp_path / "tasks" / "hello-file")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(folder: Path, extra: str = "") -> RunConfig:
    (folder / "run.yaml").write_text(RUN + extra)
    return load(folder / "run.yaml")


def test_a_refused_instruction_is_a_problem_of_its_source(folder: Path) -> None:
    assert list(data_problems(config_of(folder))) == []
    dockerfile = folder / "tasks" / "hello-file" / "environment" / "Dockerfile"
    dockerfile.write_text("FROM debian:12\nWORKDIR /app\nUSER nobody\n")
    [(key, text)] = data_problems(config_of(folder))
    assert key == "sources[0].harbor"
    assert "hello-file/environment/Dockerfile:3: USER is not supported" in text


def test_a_back_end_without_places_is_a_problem(folder: Path) -> None:
    config = config_of(folder, "sandbox: {backend: none}\n")
    [problem] = isolation_problems(config, folder / "outputs" / "harbor")
    assert (problem.key, "auto" in problem.text) == ("sandbox.backend", True)


def test_agents_never_see_the_folder_of_the_tasks(folder: Path) -> None:
    settings = isolation_settings(config_of(folder), folder / "outputs" / "harbor")
    assert folder / "tasks" in settings.hidden
