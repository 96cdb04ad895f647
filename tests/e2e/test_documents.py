# SPDX-License-Identifier: Apache-2.0
"""The README, the tutorials and the guides are followed as a new user would: every block in order,
in an empty folder. What needs more than this machine is listed with its reason."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.e2e.document_blocks import ROOT, all_blocks, blocks_of, shell_env, use
from tests.e2e.system import penstock

from penstock.config import demo_config

DEMO = "penstock demo"
LIMIT_S = 1700.0
FIRST_RUN = ROOT / "docs" / "tutorials" / "first-run.md"
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
GUIDES = sorted(
    {
        ROOT / block.page
        for block in all_blocks()
        if block.language in ("bash", "python") and not block.reason and not block.file
    }
    - {ROOT / "README.md", *TUTORIALS}
)


@pytest.fixture
def env(tmp_path: Path) -> Mapping[str, str]:
    return shell_env(tmp_path)


def follow(page: Path, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Use every block of a page in order; what each printed."""
    return [use(block, folder, env, timeout_s=LIMIT_S) for block in blocks_of(page)]


def rewards(folder: Path) -> list[float]:
    """Mean reward of each step of the only run below this folder."""
    (metrics,) = folder.glob("**/metrics.jsonl")
    return [json.loads(line)["reward/mean"] for line in metrics.read_text().splitlines()]


def test_first_run(tmp_path: Path, env: Mapping[str, str]) -> None:
    (tmp_path / "work").mkdir()
    follow(FIRST_RUN, tmp_path / "work", env)
    curve = rewards(tmp_path / "work")
    assert sum(curve[-5:]) / 5 > sum(curve[:5]) / 5


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in TUTORIALS if page != FIRST_RUN], ids=lambda page: page.stem
)
def test_tutorial(page: Path, tmp_path: Path, env: Mapping[str, str]) -> None:
    (tmp_path / "work").mkdir()
    follow(page, tmp_path / "work", env)
    if page.stem in ("own-task", "tool-agent"):
        curve = rewards(tmp_path / "work")
        assert sum(curve[-5:]) / 5 > sum(curve[:5]) / 5 + 0.1, "the reward rises"


@pytest.fixture(scope="module")
def my_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a reader of a guide has: the folder my-run of the first tutorial."""
    folder = tmp_path_factory.mktemp("reader")
    assert penstock("init", "my-run", cwd=folder).returncode == 0
    return folder


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_guide(page: Path, my_run: Path, tmp_path: Path, env: Mapping[str, str]) -> None:
    follow(page, shutil.copytree(my_run, tmp_path / "work"), env)


def test_the_readme_repeats_the_first_tutorial() -> None:
    """So its commands are run there, the demo in `test_demo`, and the others in test_newcomer."""
    tutorial = [line for block in blocks_of(FIRST_RUN) for line in block.text.splitlines()]
    commands = [
        line
        for block in blocks_of(ROOT / "README.md")
        if block.language == "bash" and not block.reason
        for line in block.text.splitlines()
    ]
    assert DEMO in commands
    assert set(commands) - {DEMO} <= set(tutorial)
    for expected in ("penstock init", "penstock check", "penstock run"):
        assert any(line.startswith(expected) for line in commands)


def demo(words: str, env: Mapping[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{DEMO} {words}"],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def test_demo(env: Mapping[str, str], tmp_path: Path) -> None:
    """The README's first command, in full. What it reaches is between 0.95 and 1 nearly always; the
    order of events, which no seed fixes, may cost more. `make e2e-long` has the promise."""
    folder = tmp_path / "demo"
    done = demo(f"--json --dir {folder}", env, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["reward_first"] <= 0.35
    assert result["reward_last"] >= 0.75
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
def test_demo_learns_from_any_seed(seed: int, env: Mapping[str, str], tmp_path: Path) -> None:
    words = f"--headless --json --seed {seed} --dir {tmp_path / 'demo'}"
    done = demo(words, env, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["reward_first"] <= 0.35
    assert result["reward_last"] >= 0.95


@pytest.mark.slow
def test_without_learning_the_reward_does_not_rise(env: Mapping[str, str], tmp_path: Path) -> None:
    words = f"--headless --json --dir {tmp_path / 'demo'} training.learning_rate=0"
    done = demo(words, env, tmp_path / "work")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert abs(result["reward_last"] - result["reward_first"]) < 0.05
