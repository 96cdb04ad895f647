# SPDX-License-Identifier: Apache-2.0
"""Rollout nodes as processes that come and go by the hundred: real node loops on the `simulated`
engine, forked from one warm Python, as `fork_server` does for services.

`python -m tests.chaos.node_processes RUN_DIR SNAPSHOT` reads lines of `[name, capacity]` and
answers with pids. The children die with this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Self

from benchmarks.overlap_real import Folder
from tests.chaos.processes import ROOT

from penstock.dataflow.client.dataflow import NodeClient
from penstock.fleet.run_folder import RunFolder
from penstock.rollout.context import Context
from penstock.rollout.delivery_queue import AckLog
from penstock.rollout.engines.simulated import LoadProfile, SimulatedEngine
from penstock.rollout.node import NodeDeps, build, on_stop_signals
from penstock.types import NodeId, Task
from penstock.wire.auth import Role

LOAD = LoadProfile(first_token_s=1.5, spread=0.4)
"""An answer takes about two seconds, most of which nobody computes."""
TOKEN_S = 12 * 3600.0


async def answer(task: Task, ctx: Context) -> float:
    """A workflow that scores itself, so that no node starts a process for rewards."""
    said = await ctx.policy("policy").chat([{"role": "user", "content": task.payload["prompt"]}])
    return float(len(set(said.text)))


async def live(folder: RunFolder, snapshot: Path, name: str, capacity: int) -> None:
    """One node, until it is drained or killed."""
    token = folder.token(folder.read_config().name, Role.ROLLOUT, ttl_s=TOKEN_S, subject=name)
    client = NodeClient(folder.endpoints().dataflow, token)
    acks = folder.path / "acks"
    acks.mkdir(exist_ok=True)
    deps = NodeDeps(
        ack_log=AckLog(acks / f"{name}.txt"),
        dataflow=client,
        make_fetcher=lambda _: Folder(snapshot),
        make_engine=lambda facts, policy, seat: SimulatedEngine(LOAD, seed=hash(name) % 2**31),
    )
    async with build(deps, node_id=NodeId(name), capacity=capacity) as node:
        with on_stop_signals(node.orders.drain):
            await node.run()
    await client.close()


class NodeProcesses:
    """The nodes of one campaign; nothing outlives it."""

    def __init__(self, folder: RunFolder, snapshot: Path) -> None:
        self.pids: dict[str, int] = {}
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.node_processes", str(folder.path), str(snapshot)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self.pids]:
            self.signal(name, signal.SIGKILL)
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.wait(timeout=300)
        self._warm.stdout.close()

    def start(self, name: str, capacity: int) -> None:
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.write(json.dumps([name, capacity]) + "\n")
        self._warm.stdin.flush()
        self.pids[name] = int(self._warm.stdout.readline())

    def signal(self, name: str, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pids[name], number)

    def is_alive(self, name: str) -> bool:
        return Path(f"/proc/{self.pids[name]}").exists()


def main(run_dir: str, snapshot: str) -> None:
    import ctypes

    folder = RunFolder(Path(run_dir))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children vanish by themselves
    for line in sys.stdin:
        name, capacity = json.loads(line)
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with this process
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _redirect(folder.logs / f"{name}.log")
            asyncio.run(live(folder, Path(snapshot), name, capacity))
            os._exit(0)
        print(pid, flush=True)


def _redirect(log: Path) -> None:
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(source, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
