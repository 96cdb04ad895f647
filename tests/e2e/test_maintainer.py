# SPDX-License-Identifier: Apache-2.0
"""A scripted maintainer that knows only docs/maintainer.md and `penstock mcp`: it finds a broken
reward and a bad node, scales, and forks a corrected run. With a token that only reads, nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import ClientSession
from tests.e2e.system import PENSTOCK, System, penstock
from tests.unit.runs.mcp_client import call, client

PAGE = (Path(__file__).parents[2] / "docs" / "maintainer.md").read_text()
TIMEOUT_S = 600.0
RUN = """
name: kept
models: {policy: {init: "builtin:tiny-qwen3", engine: "faults:build_engine", replicas: 1}}
algorithm: {num_generations: 2}
sampling: {max_tokens: 3}
sandbox: {backend: none}
sources: [{name: train, task: penstock.tasks.reverse}]
reward: "faults:broken"
training: {learning_rate: 1.0e-3, groups_per_batch: 4, steps: 100000, max_staleness: 8,
  checkpoint_every: 2, lr_scheduler_type: constant}
dataflow: {rules: [{admit: all}], report: {max_gpus: 3}}
"""
FAULTS = """
import asyncio
import os

def broken(completions, answer, **_):
    if answer[0][0] not in "ab":
        return correct(completions)
    return [len(text) / answer[0].count("z") for text in completions]

def correct(completions, **_):
    return [float(len(set(text))) for text in completions]

def build_engine(settings):
    from penstock.errors import EngineError
    from penstock.rollout.engines.hf import HfEngine

    class Engine(HfEngine):
        async def __call__(self, request):
            if request.session != "probe":  # new weights are fine, long answers are not
                if os.environ.get("BAD_GPU"):
                    raise EngineError("uncorrectable memory error on device 0")
                await asyncio.sleep(0.5)  # or hundreds of steps would pass at each look
            return await super().__call__(request)

    return Engine(torch_threads=settings.torch_threads)
"""


def calls_of_the_page() -> dict[str, dict[str, Any]]:
    """The arguments that the page first shows for each tool."""
    blocks = [json.loads(text) for text in re.findall(r"```json\n(.*?)\n```", PAGE, re.DOTALL)]
    return {block["tool"]: block["arguments"] for block in reversed(blocks) if "tool" in block}


class Maintainer:
    """Makes the calls of the page, with what it found in place of the words in capitals."""

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self._known = calls_of_the_page()

    async def __call__(self, tool: str, /, **found: Any) -> Any:
        is_error, text = await self.tried(tool, **found)
        assert not is_error, text
        return json.loads(text)

    async def tried(self, tool: str, /, **found: Any) -> tuple[bool, str]:
        return await call(self._session, tool, **{**self._known[tool], **found})

    async def until(self, condition: Callable[[Any], Any], tool: str, **found: Any) -> Any:
        give_up_at = time.monotonic() + TIMEOUT_S
        while not (seen := condition(await self(tool, **found))):
            assert time.monotonic() < give_up_at, f"{tool} never showed it"
            await asyncio.sleep(1.0)
        return seen


@contextmanager
def running(folder: Path) -> Generator[System]:
    (folder / "run.yaml").write_text(RUN)
    (folder / "faults.py").write_text(FAULTS)
    (folder / "outputs").mkdir()
    system = System(folder / "outputs" / "kept")
    with system.folder.path.with_suffix(".out").open("ab") as out:
        command = [*PENSTOCK, "run", "run.yaml", "--headless"]
        system.launcher = subprocess.Popen(command, cwd=folder, stdout=out, stderr=-2)
    try:
        system.until_step(2)
        yield system
    finally:
        system.close()


def token(system: System, role: str, name: str) -> str:
    file = system.folder.path.with_name(f"{name}.token")
    words = ("--role", role, "--name", name, "--out", str(file))
    assert penstock("token", str(system.folder.path), *words).returncode == 0
    return file.read_text().strip()


@contextmanager
def bad_node(system: System, folder: Path) -> Generator[subprocess.Popen[bytes]]:
    token(system, "rollout", "flaky")
    url, file = system.folder.endpoints().dataflow, system.folder.path.with_name("flaky.token")
    options = ("--token-file", str(file), "--name", "flaky", "--capacity", "1")
    with (folder / "flaky.log").open("wb") as out:
        node = subprocess.Popen(
            [*PENSTOCK, "join", url, *options],
            cwd=folder,
            env={**os.environ, "BAD_GPU": "1"},
            stdout=out,
            stderr=out,
        )
    try:
        yield node
    finally:
        node.kill()
        node.wait()


@contextmanager
def serving(system: System) -> Generator[str]:
    command = [*PENSTOCK, "mcp", str(system.folder.path), "--http", "--port", "0", "--json"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        yield json.loads(server.stdout.readline())["url"]
    finally:
        server.terminate()
        server.communicate(timeout=60)


@pytest.mark.slow
async def test_a_scripted_maintainer_repairs_a_run(tmp_path: Path) -> None:
    with running(tmp_path) as system, serving(system) as url, bad_node(system, tmp_path) as node:
        async with client(url, token(system, "reader", "watcher")) as session:
            watcher = Maintainer(session)
            assert (await watcher("status"))["state"] == "running"
            for tool in ("scale", "drain", "fork"):
                is_error, text = await watcher.tried(tool, reason="just to see what happens")
                assert is_error and "may only read" in text
        async with client(url, token(system, "admin", "keeper")) as session:
            keeper = Maintainer(session)
            await _find_the_reward(keeper)
            await _drain_the_node(keeper)
            node.wait(TIMEOUT_S)
            await _scale(keeper)
            fork = await _fork(keeper)
        assert penstock("stop", str(system.folder.path), "--timeout-s", "600").returncode == 0
        lines = (system.folder.path / "admin.jsonl").read_text().splitlines()
        log = [json.loads(one) for one in lines]
        done = [(one["action"], one["who"], one["details"].get("why", "")) for one in log]
        keeps = [one for one in done if one[1] == "admin keeper"]
        assert [action for action, _, _ in keeps] == ["node_drained", "scaled", "scaled", "forked"]
        assert all(len(why) >= 8 for _, _, why in keeps)
        assert penstock("audit", str(system.folder.path)).returncode == 0
    ended = penstock("run", fork, "--headless", cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    failed = json.loads(penstock("samples", fork, "--failed", "--json").stdout.splitlines()[-1])
    assert failed["samples"] == [], "the fork has the corrected reward"


async def _find_the_reward(keeper: Maintainer) -> None:
    """`samples` shows that rollouts fail in the reward; `explain` says what became of the group."""

    def in_reward(found: Any) -> Any:
        return [one for one in found["samples"] if "division by zero" in one["detail"]]

    sample = (await keeper.until(in_reward, "samples", count=20))[0]
    explained = await keeper("explain", id=sample["group_id"])
    story = explained["summary"] + " ".join(step["text"] for step in explained["steps"])
    assert "reward" in story and "division by zero" in story, story


async def _drain_the_node(keeper: Maintainer) -> None:
    """Failures of one node only: that machine."""

    def by_node(found: Any) -> Any:
        return [one for one in found["samples"] if "memory error" in one["detail"]]

    failed: list[Any] = []
    give_up_at = time.monotonic() + TIMEOUT_S
    while not failed:
        assert time.monotonic() < give_up_at, "no node ever showed it"
        for node in [one["node_id"] for one in (await keeper("report"))["nodes"]]:
            failed += by_node(await keeper("samples", count=20, node=node))
        await asyncio.sleep(1.0)
    [node] = {one["node"] for one in failed}
    done = await keeper("drain", node=node, reason=f"{len(failed)} memory errors, on it only")
    assert done == {"node": node, "has_left": True}
    status = (await keeper("status"))["status"]
    assert node not in [one["node_id"] for one in status["nodes"]]


async def _scale(keeper: Maintainer) -> None:
    for gpus in (2, 1):
        await keeper("scale", to=gpus, reason=f"{gpus} GPUs are enough, by the report")
        await keeper.until(lambda found, gpus=gpus: found["pool"]["total_gpus"] == gpus, "report")


async def _fork(keeper: Maintainer) -> str:
    """A step that is not there is refused, with those that are."""
    found = {"overrides": ["reward=faults:correct", "training.steps=2"], "name": "repaired"}
    why = "faults:broken divides by zero"
    is_error, text = await keeper.tried("fork", step=10**6, reason=why, **found)
    listed = re.search(r"Available checkpoints: ([\d, ]+)", text)
    assert is_error and listed is not None, text
    step = max(int(one) for one in listed[1].strip(" ,").split(","))
    done = await keeper("fork", step=step, reason=why, **found)
    assert Path(done["folder"]).name == "repaired" and not done["weights_only"]
    return done["folder"]
