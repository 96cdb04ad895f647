# SPDX-License-Identifier: Apache-2.0
"""What `penstock check` says of environments that are not installed here, or do not answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.rollout.environments.test_environments import FAKE
from tests.unit.runs.broken_cases import edited

from penstock.runs.preflight import check_run, find_problems
from penstock.runs.target import read_target

FLOW = """
async def play(task, ctx):
    seen = await ctx.env.reset()
    await ctx.policy().chat([{"role": "user", "content": "abc"}])
    while not seen.done:
        seen = await ctx.env.step("down")
    return await ctx.env.score()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tmp_path.chmod(0o755)  # each sandbox has its own user
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "lake_flow.py").write_text(FLOW)
    return tmp_path


def write(folder: Path, env: str) -> Path:
    sources = f"sources:\n  - {{name: lake, workflow: 'lake_flow:play', env: {env}}}"
    path = folder / "run.yaml"
    path.write_text(edited(sources, "reward:~"))
    return path


def problems(folder: Path, env: str) -> str:
    return "\n".join(map(str, find_problems(read_target(write(folder, env), ()))))


def test_a_missing_virtual_environment_names_the_command_that_makes_it(folder: Path) -> None:
    said = problems(folder, "{gymnasium: FrozenLake-v1}")
    assert "sources[0].env.gymnasium: needs gymnasium" in said
    assert str(folder / "cache" / "envs" / "gymnasium" / "bin" / "python") in said
    assert "run `make setup-envs`" in said and "env.python" in said


def test_a_missing_interpreter_or_program_is_named(folder: Path) -> None:
    said = problems(folder, "{verifiers: x, python: /nowhere/bin/python}")
    assert "sources[0].env.python: needs verifiers, and /nowhere/bin/python does not exist" in said
    said = problems(folder, "{command: [no-such-program]}")
    assert "sources[0].env.command: program 'no-such-program' not found" in said


def test_check_plays_one_episode_and_reports_how_it_failed(folder: Path) -> None:
    path = write(folder, f"{{command: [{sys.executable}, {FAKE}, crash]}}")
    report = check_run(read_target(path, ()))
    (said,) = map(str, report.problems)
    assert "environment of source lake" in said
    assert "its process ended (exit code 3) (last output: the world ended)" in said
    assert any("isolation of environments" in note for note in report.notes)
