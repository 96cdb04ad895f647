# SPDX-License-Identifier: Apache-2.0
"""Every bash block of the README and of the docs is run as a new user would run it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.config import demo_config

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
DEMO = "penstock demo"
LIMIT_S = 280.0


def documents() -> list[Path]:
    found = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [path for path in found if path.exists()]


def blocks() -> dict[str, str]:
    """Where each different block stands first; equal commands are run once."""
    found: dict[str, str] = {}
    for path in documents():
        for match in BLOCK.finditer(path.read_text()):
            commands = " && ".join(line for line in match[1].splitlines() if line.strip())
            found.setdefault(commands, f"{path.relative_to(ROOT)}")
    return found


@pytest.fixture
def shell_env(tmp_path: Path) -> dict[str, str]:
    """A shell in which `penstock` is the one under test."""
    program = tmp_path / "bin" / "penstock"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m penstock.cli.main "$@"\n')
    program.chmod(0o755)
    return {**os.environ, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def run_block(commands: str, env: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


@pytest.mark.parametrize(
    "commands", [commands for commands in blocks() if commands != DEMO], ids=blocks().get
)
def test_block_runs(commands: str, shell_env: dict[str, str], tmp_path: Path) -> None:
    done = run_block(commands, shell_env, tmp_path / "work")
    assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"


def test_the_readme_starts_with_the_demo_and_a_run_of_ones_own() -> None:
    text = (ROOT / "README.md").read_text()
    commands = " ".join(match[1] for match in BLOCK.finditer(text))
    for expected in (DEMO, "penstock init my-run", "penstock check", "penstock run"):
        assert expected in commands


def test_demo(shell_env: dict[str, str], tmp_path: Path) -> None:
    """The README's first command, in full, with what it promises."""
    folder = tmp_path / "demo"
    done = run_block(f"{DEMO} --json --dir {folder}", shell_env, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["reward_first"] <= 0.35
    assert result["reward_last"] >= 0.95
    assert (result["lost"], result["trained_twice"]) == (0, 0)
    training = demo_config(0).training
    assert result["steps"] == training.steps
    assert result["trajectories"] >= training.steps * training.groups_per_batch * 16
    acknowledged = [path.read_text().count("\n") for path in (folder / "acks").iterdir()]
    assert sum(acknowledged) == result["trajectories"], "`lost` looked at every one of them"
    assert list(result) == [
        "reward_first",
        "reward_last",
        "steps",
        "trajectories",
        "lost",
        "trained_twice",
        "seconds",
        "cpu_ms_per_trajectory",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_demo_learns_from_any_seed(seed: int, shell_env: dict[str, str], tmp_path: Path) -> None:
    command = f"{DEMO} --headless --json --seed {seed} --dir {tmp_path / 'demo'}"
    done = run_block(command, shell_env, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["reward_first"] <= 0.35
    assert result["reward_last"] >= 0.95


@pytest.mark.slow
def test_without_learning_the_reward_does_not_rise(
    shell_env: dict[str, str], tmp_path: Path
) -> None:
    command = f"{DEMO} --headless --json --dir {tmp_path / 'demo'} training.learning_rate=0"
    done = run_block(command, shell_env, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert abs(result["reward_last"] - result["reward_first"]) < 0.05
