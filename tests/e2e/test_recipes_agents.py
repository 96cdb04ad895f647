# SPDX-License-Identifier: Apache-2.0
"""Recipes with several roles, sub-agents, environments and tools: each run learns, as its README
starts it. Its files are copied, so that the run cannot write into the repository."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import pytest
from tests.e2e.system import System, assert_complete

from penstock.runs.history import open_run
from penstock.runs.recorded_trajectory import RecordedTrajectory
from penstock.types import view_ids

RECIPES = Path(__file__).parents[2] / "recipes"
MARGIN = 0.3
"""Far below the rise that each README measured."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "name", "model"),
    [
        ("planner_executor_verifier", "planner", "outputs/tiny-planner"),
        ("recursive_agent", "recursive", ""),
        ("text_game", "text-game", ""),
        ("search_qa", "search-qa", "outputs/tiny-search"),
    ],
)
def test_a_recipe_learns(tmp_path: Path, recipe: str, name: str, model: str) -> None:
    folder = copied(recipe, tmp_path)
    if model:
        subprocess.run([sys.executable, "make_model.py", model], cwd=folder, check=True)
    system = System(folder / "outputs" / name)
    (folder / "outputs").mkdir(exist_ok=True)
    try:
        system.run_file(folder / "run.yaml", timeout_s=800.0)
    finally:
        system.close()
    with open_run(system.folder.path) as run:
        steps = [line for line in run.metrics() if not line.get("skipped")]
        rows = [*run.trajectories(steps=(1, None))]
    assert_complete(system, steps=len(steps))
    sampled = sum(len(view_ids(turn.sampled_ids)) for row in rows for turn in row.turns)
    assert sampled == sum(step["tokens/trained"] for step in steps)  # each of them once
    check_parts(recipe, rows)
    rewards = [step["reward/mean"] for step in steps]
    tenth = len(rewards) // 10
    first, last = fmean(rewards[:tenth]), fmean(rewards[-tenth:])
    assert last > first + MARGIN, f"from {first:.2f} to {last:.2f}"


def check_parts(recipe: str, rows: Sequence[RecordedTrajectory]) -> None:
    """What the recipe is there to show, beside the reward."""
    tenth = len(rows) // 10
    early, late = rows[:tenth], rows[-tenth:]
    if recipe == "planner_executor_verifier":
        assert malformed_share(late) < malformed_share(early) / 2
    if recipe == "recursive_agent":
        agents = {turn.agent for row in late for turn in row.turns}
        assert agents == {"", "0", "0.0", "0.1", "1", "1.0", "1.1"}
    if recipe == "text_game":
        assert max(len(row.turns) for row in late) == 3  # a turn for each door
    if recipe == "search_qa":
        assert search_share(late) > search_share(early) + 0.2


def malformed_share(rows: Sequence[RecordedTrajectory]) -> float:
    replies = [turn for row in rows for turn in row.turns if turn.role == "planner"]
    return fmean(reply.reward is not None for reply in replies)


def search_share(rows: Sequence[RecordedTrajectory]) -> float:
    return fmean(row.payload is not None and len(row.payload.tool_uses) > 0 for row in rows)


def copied(recipe: str, to: Path) -> Path:
    """A copy that a sandbox, which has a user of its own under root, can read."""
    folder = to / recipe
    shutil.copytree(RECIPES / recipe, folder, ignore=shutil.ignore_patterns("outputs"))
    to.chmod(0o755)
    return folder
