# SPDX-License-Identifier: Apache-2.0
"""Harbor tasks in whole runs: the recipe, and nodes that are killed while agents work inside tasks.

Each task is scored once, and no sandbox is left."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from pathlib import Path

import psutil
import pytest
import yaml
from tests.e2e.system import PENSTOCK, System, assert_complete, until

from penstock.rollout.sandbox.cgroups import find_parents
from penstock.rollout.sandbox.owners import prefix_of

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "harbor_tasks"
TASKS = ROOT / "tests" / "harbor_tasks"
NUM_KILLS = 10
AGENT = """
import os, subprocess, sys, time
exec(open({model!r}).read().replace("sys.stdin.read()", repr("ab>")))
time.sleep(1.0)  # so that there is something to kill
if int(os.environ["PENSTOCK_SEED"]) % 2:
    subprocess.run(["sh", "-c", {solutions!r}[sys.argv[1]]])
"""
"""Asks the model as the agent of the recipe does, and solves about half of its tasks."""


def write_run(folder: Path) -> Path:
    """All 20 tasks, twice each; every group is trained."""
    solutions = {
        (task / "instruction.md").read_text(): (task / "solution" / "solve.sh").read_text()
        for task in TASKS.iterdir()
    }
    model = folder / "model_agent.py"
    model.write_text((RECIPE / "agent.py").read_text())
    agent = AGENT.format(model=str(model), solutions=solutions)
    (folder / "agent.py").write_text(agent)
    config = {
        "name": "killed",
        "output_dir": str(folder),
        "models": {"policy": {"init": "builtin:tiny-qwen3", "replicas": 1, "capacity": 4}},
        "sources": [{"name": "shell", "harbor": str(TASKS), "limit": 20}],
        "workflow": {"command": ["python3", "agent.py", "{instruction}"]},
        "sandbox": {"workflow": {"folders": [str(model)]}},
        "sampling": {"max_tokens": 3},
        "dataflow": {"lease": {"max_attempts": 2 * NUM_KILLS}},  # one slot may meet every kill
        "algorithm": {"name": "grpo", "num_generations": 2},
        "training": {"learning_rate": 1e-3, "groups_per_batch": 4, "steps": 5, "max_staleness": 4},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return folder / "run.yaml"


def agents(folder: Path) -> list[psutil.Process]:
    """Processes of agents of this run, inside sandboxes."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if str(folder / "agent.py") in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def is_at_work(system: System, folder: Path, num_scored: int) -> bool:
    """Whether an agent of the node works (`check` starts one before), after so many scores: a
    launcher gives up where kills leave no room for progress."""
    node = system.pids().get("node-0", 0)
    if num_scored and len(scored(system.folder.path)) < num_scored:
        return False
    try:
        inside = {child.pid for child in psutil.Process(node).children(recursive=True)}
    except psutil.NoSuchProcess:
        return False
    return node > 0 and any(agent.pid in inside for agent in agents(folder))


def scored(run: Path) -> list[tuple[str, int, float]]:
    with sqlite3.connect(run / "ledger" / "ledger.db") as database:
        query = "SELECT group_id, slot, reward FROM rows WHERE reward IS NOT NULL"
        return database.execute(query).fetchall()


@pytest.mark.slow
def test_a_node_is_killed_while_agents_work_and_each_task_is_scored_once(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    system = System(tmp_path / "killed")
    killed: list[int] = []
    with (tmp_path / "out.txt").open("wb") as out:
        words = ("run", str(file), "--headless")
        system.launcher = subprocess.Popen([*PENSTOCK, *words], cwd=tmp_path, stdout=out, stderr=-2)
    try:
        for number in range(NUM_KILLS):
            until(
                lambda least=3 * number: is_at_work(system, tmp_path, least),
                timeout_s=600.0,
                what="agents work, and more tasks are scored",
            )
            killed.append(system.kill("node-0"))
            system.until_back("node-0", other_than=killed[-1])
        assert system.wait(900.0) == 0, (tmp_path / "out.txt").read_text()
    finally:
        system.close()
    assert_complete(system, steps=5)
    rows = scored(system.folder.path)
    assert len(rows) == 2 * 20 == len({(group, slot) for group, slot, _ in rows})
    assert {reward for _, _, reward in rows} == {0.0, 1.0}
    assert agents(tmp_path) == []
    assert [group for pid in killed for group in groups_of(pid)] == []


def groups_of(pid: int) -> list[Path]:
    """Control groups of the sandboxes that this process made."""
    folders = find_parents().folders.values()
    return [path for folder in folders for path in folder.glob(f"{prefix_of(pid)}*")]


@pytest.mark.slow
def test_the_recipe_learns(tmp_path: Path) -> None:
    system = System(tmp_path / "harbor-tasks")
    try:
        system.run_file(RECIPE / "run.yaml", timeout_s=900.0)
    finally:
        system.close()
    lines = [json.loads(line) for line in system.folder.metrics.read_text().splitlines()]
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-4:]) / 4 > 2 * sum(rewards[:4]) / 4
    assert_complete(system, steps=20)
