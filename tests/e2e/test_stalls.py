# SPDX-License-Identifier: Apache-2.0
"""Six ways in which a run stands still: the right component and item are named within 5 s of the
limit, then the run recovers, or ends with exit code 5; no process is left. And a spent budget."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.system import PENSTOCK, System, assert_complete, is_gone, penstock, until

LIMIT_S = 8.0
NAMED_WITHIN_S = 5.0
FOREVER_S = 600
STEPS = 8
RUN = """
name: stalls
models: {{policy: {{init: "builtin:tiny-qwen3", engine: "faults:build_engine", replicas: 1}}}}
algorithm: {{num_generations: 2}}
sampling: {{max_tokens: 3}}
sandbox: {{backend: none}}
training: {{learning_rate: 1.0e-3, groups_per_batch: 4, steps: {steps}, max_staleness: 1,
  checkpoint_every: 2}}
dataflow: {{rules: [{{admit: all}}]}}
stall: {{limit_s: {limit_s}, action: {action}}}
"""
REVERSE = """
sources: [{name: train, task: penstock.tasks.reverse}]
reward: "faults:reward"
"""
WORLD = """
sources: [{{name: world, env: {{command: [{python}, {world}], step_timeout_s: 600}}}}]
workflow: "faults:play"
"""
GRAPH = """
pipeline:
  stages:
    - {id: advantage, type: compute, role: advantage, reads: [reward], writes: [advantage]}
    - {id: train, type: train, role: actor, reads: [turns, advantage], fn: "faults:loss"}
"""
FAULTS = """
import asyncio, os, time
from pathlib import Path

HERE = Path(__file__).parent

def is_armed(fault):
    return (HERE / fault).exists()

def reward(completions, **_):
    while is_armed("reward"):
        time.sleep(0.1)
    return [float(len(set(text))) for text in completions]

async def play(task, ctx):
    seen = await ctx.env.reset()
    answer = await ctx.policy().chat([{"role": "user", "content": "abc"}])
    while not seen.done:
        seen = await ctx.env.step("down")
    return float(len(set(answer.text)))

def loss(tokens):
    from penstock import TokenLoss
    if is_armed("trainer"):
        (HERE / "trainer").unlink()
        os._exit(0)
    return TokenLoss(loss_K=-tokens.logprobs_K * tokens.advantages_K, metrics={})

def build_engine(settings):
    from penstock.rollout.engines.hf import HfEngine

    class Engine(HfEngine):
        async def load(self, folder, version):
            while is_armed("load"):
                await asyncio.sleep(0.1)
            await super().load(folder, version)

    return Engine(torch_threads=settings.torch_threads)
"""
WORLD_PROGRAM = """
import json, sys, time
from pathlib import Path

for line in sys.stdin:
    request = json.loads(line)
    call, answer = request["call"], {}
    if call == "hello":
        answer = {"protocol": 1}
    elif call == "reset":
        answer = {"observation": {"text": "one left"}}
    elif call == "step":
        while Path(__file__).with_name("environment").exists():
            time.sleep(0.1)
        answer = {"observation": {"text": "none left", "done": True, "reward": 1.0}}
    elif call == "score":
        answer = {"score": 1.0}
    print(json.dumps({"id": request["id"], **answer}), flush=True)
"""


class Stalling:
    """A run that stands still on demand."""

    def __init__(
        self, folder: Path, *, action: str, sources: str = REVERSE, more: str = ""
    ) -> None:
        self._folder = folder
        if sources == WORLD:
            (folder / "world.py").write_text(WORLD_PROGRAM)
            sources = WORLD.format(python=sys.executable, world=folder / "world.py")
        head = RUN.format(steps=STEPS, limit_s=LIMIT_S, action=action)
        (folder / "run.yaml").write_text(head + sources + more)
        (folder / "faults.py").write_text(FAULTS)
        (folder / "outputs").mkdir()
        self.system = System(folder / "outputs" / "stalls")
        command = [*PENSTOCK, "run", "run.yaml", "--headless", "--json"]
        with self.system.folder.path.with_suffix(".out").open("ab") as out:
            self.system.launcher = subprocess.Popen(command, cwd=folder, stdout=out, stderr=-2)

    def arm(self, fault: str) -> None:
        (self._folder / fault).touch()

    def disarm(self, fault: str) -> None:
        (self._folder / fault).unlink(missing_ok=True)

    def record(self) -> dict[str, Any] | None:
        """Of the first stall."""
        path = self.system.folder.logs / "latest" / "stall-1.json"
        try:
            return json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None

    def until_stalled(self) -> dict[str, Any]:
        until(self.record, timeout_s=FOREVER_S, what="the stall is recorded")
        found = self.record()
        assert found is not None
        assert found["limit_s"] <= found["idle_s"] <= found["limit_s"] + NAMED_WITHIN_S, found
        return found

    def descendants(self) -> list[psutil.Process]:
        assert self.system.launcher is not None
        return psutil.Process(self.system.launcher.pid).children(recursive=True)


def names(record: dict[str, Any]) -> str:
    return " / ".join(f"{link['who']} -> {link['on']} ({link['item']})" for link in record["chain"])


def test_a_reward_that_sleeps_for_ever_is_named_and_ends_the_run(tmp_path: Path) -> None:
    stalling = Stalling(tmp_path, action="stop")
    try:
        stalling.system.until_step(2)
        left = stalling.descendants()
        stalling.arm("reward")
        record = stalling.until_stalled()
        last = record["chain"][-1]
        assert (last["who"], last["on"]) == ("node-0", "reward faults:reward"), names(record)
        assert last["item"].startswith("group ")
        assert record["chain"][0]["who"] == "trainer-policy", names(record)
        assert stalling.system.wait() == 5, stalling.system.output()
        assert last["on"] in stalling.system.last_line()["error"]
        node_log = (stalling.system.folder.logs / "latest" / "node-0.log").read_text()
        assert "asyncio task" in node_log and "Current thread" in node_log
        until(lambda: all(is_gone(p.pid) for p in left), timeout_s=60.0, what="no orphans")
    finally:
        stalling.system.close()


@pytest.mark.slow
def test_an_environment_that_never_returns_is_named_and_the_run_recovers(tmp_path: Path) -> None:
    stalling = Stalling(tmp_path, action="restart", sources=WORLD)
    try:
        stalling.system.until_step(2)
        stalling.arm("environment")
        record = stalling.until_stalled()
        last = record["chain"][-1]
        assert last["who"] == "node-0" and last["on"].endswith(", step"), names(record)
        assert "environment" in last["on"] and last["item"].startswith("row "), names(record)
        stalling.disarm("environment")
        assert stalling.system.wait() == 0, stalling.system.output()
        assert_complete(stalling.system, steps=STEPS)
    finally:
        stalling.system.close()


@pytest.mark.slow
def test_a_suspended_node_is_named_and_replaced(tmp_path: Path) -> None:
    stalling = Stalling(tmp_path, action="restart")
    try:
        stalling.system.until_step(2)
        pid = stalling.system.pids()["node-0"]
        os.kill(pid, signal.SIGSTOP)
        record = stalling.until_stalled()
        last = record["chain"][-1]
        assert (record["culprit"], last["who"], last["on"]) == ("node-0", "node-0", "SIGCONT")
        assert last["item"] == f"its process {pid} is suspended", names(record)
        assert stalling.system.wait() == 0, stalling.system.output()
        assert_complete(stalling.system, steps=STEPS)
    finally:
        stalling.system.close()


@pytest.mark.slow
def test_a_killed_node_is_named_and_started_again_before_the_run_stalls(tmp_path: Path) -> None:
    stalling = Stalling(tmp_path, action="restart")
    try:
        stalling.system.until_step(2)
        stalling.system.kill("node-0")
        assert stalling.system.wait() == 0, stalling.system.output()
        assert "node-0 was killed by SIGKILL" in stalling.system.output()
        assert stalling.record() is None
        assert_complete(stalling.system, steps=STEPS)
    finally:
        stalling.system.close()


@pytest.mark.slow
def test_a_load_of_weights_that_blocks_is_named_and_its_node_replaced(tmp_path: Path) -> None:
    stalling = Stalling(tmp_path, action="restart")
    try:
        stalling.system.until_step(2)
        stalling.arm("load")
        record = stalling.until_stalled()
        last = record["chain"][-1]
        assert (last["who"], last["on"]) == ("node-0", "the engine of policy, load"), names(record)
        assert last["item"].startswith("version policy"), names(record)
        stalling.disarm("load")
        assert stalling.system.wait() == 0, stalling.system.output()
        assert_complete(stalling.system, steps=STEPS)
    finally:
        stalling.system.close()


@pytest.mark.slow
def test_a_trainer_that_exits_early_is_named_and_started_again(tmp_path: Path) -> None:
    stalling = Stalling(tmp_path, action="restart", sources=REVERSE + GRAPH)
    try:
        stalling.system.until_step(2)
        stalling.arm("trainer")
        record = stalling.until_stalled()
        last = record["chain"][-1]
        assert last["on"] == "trainer-policy", names(record)
        assert last["item"].startswith("it exited with code 0 at step "), names(record)
        assert stalling.system.wait() == 0, stalling.system.output()
        assert_complete(stalling.system, steps=STEPS)
    finally:
        stalling.system.close()


@pytest.mark.slow
def test_a_spent_budget_ends_the_run_with_a_checkpoint_and_more_resumes_it(tmp_path: Path) -> None:
    stalling = Stalling(tmp_path, action="stop", more="budget: {tokens: 60}\n")
    try:
        system = stalling.system
        assert system.wait() == 6, system.output()
        said = system.last_line()
        assert "budget of 60 tokens is spent" in said["budget"] and not said["finished"]
        step = said["steps"]
        assert 0 < step < STEPS and (system.folder.checkpoints / f"step_{step}").is_dir()
        system.until_nothing_is_left()
        again = penstock("run", str(system.folder.path), "--headless", "--json")
        assert again.returncode == 6 and json.loads(again.stdout)["seconds"] == 0.0
        words = ("budget.tokens=100000", "--headless")
        done = penstock("run", "run.yaml", *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert_complete(system, steps=STEPS)
    finally:
        stalling.system.close()
