# SPDX-License-Identifier: Apache-2.0
"""Two policies that train all their weights in one run, beside a frozen judge: one trainer is
stopped and killed, and the other does not wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.e2e.system import PENSTOCK, System, assert_complete, penstock, until

NAMES = ("free", "stuck", "judge")
STEPS = 8
BUDGET = 2 * 2
"""Groups that `stuck` may keep: (max_staleness + 1) × groups_per_batch."""
RUN = """
name: trio
models:
  free: {init: "builtin:tiny-qwen3", capacity: 8, training: {groups_per_batch: 4}}
  stuck:
    init: "builtin:tiny-qwen3"
    replicas: 0  # the node of `free` serves all
    training: {learning_rate: 1.0e-4, groups_per_batch: 2}
  judge: {init: "builtin:tiny-qwen3", frozen: true, replicas: 0}
roles: {solver: free}
sources:
  - {name: train, task: penstock.tasks.reverse}
workflow: trio:play
algorithm: {num_generations: 2}
sampling: {max_tokens: 3}
training: {learning_rate: 1.0e-3, steps: 8, max_staleness: 1, checkpoint_every: 2}
"""
TRIO = """
import random

async def play(task, ctx):
    asked = [{"role": "user", "content": task.payload["prompt"]}]
    for name in ("free", "stuck", "judge"):
        await ctx.policy(name).chat(asked)
    return random.random()
"""


def numbers(system: System) -> dict[str, int]:
    status = system.status()
    return {} if status is None else {p.policy: p.number for p in status.policies}


def until_number(system: System, policy: str, number: int) -> None:
    def reached() -> bool:
        assert system.launcher is not None
        assert system.launcher.poll() is None, system.output()
        return numbers(system).get(policy, 0) >= number

    until(reached, timeout_s=600.0, what=f"{policy} at {number}")


def start_trio(folder: Path, text: str) -> System:
    (folder / "run.yaml").write_text(text)
    (folder / "trio.py").write_text(TRIO)
    system = System(folder / "trio")
    words = ("run", "run.yaml", f"output_dir={folder}", "--headless")
    with (folder / "trio.out").open("wb") as out:
        system.launcher = subprocess.Popen([*PENSTOCK, *words], cwd=folder, stdout=out, stderr=-2)
    return system


def test_a_trainer_that_stands_still_or_dies_holds_up_no_other(tmp_path: Path) -> None:
    system = start_trio(tmp_path, RUN)
    try:
        until(system.folder.config_file.exists, timeout_s=300.0, what="the run folder")
        until(lambda: "trainer-stuck" in system.pids(), timeout_s=300.0, what="the trainers")
        until_number(system, "stuck", 1)
        stopped = system.pids()["trainer-stuck"]
        os.kill(stopped, signal.SIGSTOP)
        at = numbers(system)["stuck"]
        until_number(system, "free", STEPS)
        status = system.status()
        assert status is not None
        [stuck] = [policy for policy in status.policies if policy.policy == "stuck"]
        assert stuck.number <= at + 1 < STEPS, "it stood still while the other trained all steps"
        assert stuck.ready + 2 * stuck.sealed <= BUDGET, "what it keeps is bounded"
        assert "judge" not in numbers(system)
        os.kill(stopped, signal.SIGKILL)
        system.until_back("trainer-stuck", stopped)
        assert system.wait(900.0) == 0, system.output()
    finally:
        system.close()
    assert_complete(system, steps=STEPS)
    told = penstock("weights", "ls", str(system.folder.path), "--json")
    versions = json.loads(told.stdout.splitlines()[-1])["versions"]
    published = {p: max(v["number"] for v in versions if v["policy"] == p) for p in NAMES}
    assert published == {"free": STEPS, "stuck": STEPS, "judge": 0}


WINDOW = 25
"""Steps of `free` over which its rate is measured."""


def work_per_step(system: System, begin: int) -> float:
    """Rollouts that all nodes made for each step of `free`, over the steps after `begin`."""
    until_number(system, "free", begin)
    before = system.status()
    until_number(system, "free", begin + WINDOW)
    after = system.status()
    assert before is not None and after is not None
    steps = [policy.number for status in (before, after) for policy in status.policies[:1]]
    return (after.trajectories - before.trajectories) / (steps[1] - steps[0])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_trainer_that_stands_still_for_ever_costs_the_other_no_work(tmp_path: Path) -> None:
    """Nodes are the bottleneck, so the step rate of the other is the nodes' speed over the work for
    each step. The work is counted: a clock would measure what else this machine does."""
    text = RUN.replace("steps: 8, max_staleness: 1", "steps: 500, max_staleness: 2")
    system = start_trio(tmp_path, text)
    try:
        until(system.folder.config_file.exists, timeout_s=300.0, what="the run folder")
        until_number(system, "stuck", 1)
        before = work_per_step(system, 5)
        stopped = system.pids()["trainer-stuck"]
        os.kill(stopped, signal.SIGSTOP)
        after = work_per_step(system, numbers(system)["free"] + 10)  # its budget is full by then
        os.kill(stopped, signal.SIGCONT)
    finally:
        system.close()
    assert after <= before * 1.05, (before, after)


EIGHT = """
name: eight
models:
MODELS
sources:
  - {name: train, task: penstock.tasks.reverse}
workflow: all_of:play
algorithm: {num_generations: 2}
sampling: {max_tokens: 3}
training: {learning_rate: 1.0e-3, groups_per_batch: 2, steps: 3}
"""
MODEL = '  p{}: {{init: "builtin:tiny-qwen3", engine: simulated, replicas: {}}}'
ALL_OF = """
import random

async def play(task, ctx):
    for n in range(8):
        await ctx.policy(f"p{n}").chat([{"role": "user", "content": task.payload["prompt"]}])
    return random.random()
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_policies_train_at_once(tmp_path: Path) -> None:
    """Eight trainers and one node with eight `simulated` engines: none starves, none waits."""
    models = [MODEL.format(n, int(n == 0)) for n in range(8)]
    (tmp_path / "run.yaml").write_text(EIGHT.replace("MODELS", "\n".join(models)))
    (tmp_path / "all_of.py").write_text(ALL_OF)
    system = System(tmp_path / "eight")
    try:
        system.run_file(tmp_path / "run.yaml", timeout_s=1500.0)
    finally:
        system.close()
    assert_complete(system, steps=3)
    told = penstock("weights", "ls", str(system.folder.path), "--json")
    versions = json.loads(told.stdout.splitlines()[-1])["versions"]
    names = {f"p{n}" for n in range(8)}
    assert {v["policy"] for v in versions if v["number"] == 3} == names


POOLS = """
name: pools
models:
  big: {init: "builtin:tiny-qwen3"}
  small: {init: "builtin:tiny-qwen3"}
sources:
  - {name: hard, task: penstock.tasks.reverse, policies: [big]}
  - {name: easy, task: penstock.tasks.reverse, policies: [small]}
workflow: alone:play
algorithm: {num_generations: 2}
sampling: {max_tokens: 3}
training: {learning_rate: 1.0e-3, groups_per_batch: 2, steps: 2}
"""
ALONE = """
import random

async def play(task, ctx):
    await ctx.policy().chat([{"role": "user", "content": task.payload["prompt"]}])
    return random.random()
"""


@pytest.mark.slow
def test_each_pool_loads_and_serves_its_own_policy(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(POOLS)
    (tmp_path / "alone.py").write_text(ALONE)
    system = System(tmp_path / "pools")
    try:
        system.run_file(tmp_path / "run.yaml", timeout_s=800.0)
    finally:
        system.close()
    assert_complete(system, steps=2)
    for policy, other in (("big", "small"), ("small", "big")):
        log = (system.folder.logs / "latest" / f"{policy}-node-0.log").read_text()
        assert f'"version": "{policy}@1.1"' in log and f"{other}@" not in log
