# SPDX-License-Identifier: Apache-2.0
"""The service processes of one run, as a fault campaign holds them: start, kill, stop, wait.

Takes the list of commands as it is: one dataflow service, or home and its partitions."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx2

from penstock.config import RunConfig, demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Signer

ROOT = Path(__file__).parents[2]
READY_S = 300.0
ENDLESS = 1_000_000
GROUPS_PER_BATCH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One service of the run: `penstock` with these words."""

    name: str
    words: tuple[str, ...]
    url: str


def make_run(path: Path, *, num_partitions: int = 1) -> RunFolder:
    """A run folder with small batches, short leases, endless work and room for a small disk; keys
    and addresses chosen."""
    folder = RunFolder(path)
    folder.path.mkdir(parents=True)
    config = small_config(num_partitions)
    folder.write_config(config)
    Signer.create(folder.keys, config.name)
    folder.allocate_endpoints(folder.path, (), num_partitions=num_partitions)
    folder.logs.mkdir()
    return folder


def small_config(num_partitions: int) -> RunConfig:
    config = demo_config(0)
    training = config.training.model_copy(
        update={"groups_per_batch": GROUPS_PER_BATCH, "steps": ENDLESS, "max_staleness": 2}
    )
    algorithm = config.algorithm.model_copy(update={"num_generations": 4})
    lease = config.dataflow.lease.model_copy(update={"ttl_s": 3.0})
    bounds = config.dataflow.bounds.model_copy(update={"disk_free_mb": 16, "disk_reserve_mb": 8})
    dataflow = config.dataflow.model_copy(
        update={"lease": lease, "bounds": bounds, "partitions": num_partitions}
    )
    changes = {"training": training, "algorithm": algorithm, "dataflow": dataflow}
    return config.model_copy(update=changes)


def commands(folder: RunFolder) -> list[Command]:
    """Home with its own partition, then the further ones."""
    words, endpoints = ("dataflow", "--run-dir", str(folder.path)), folder.endpoints()
    home = Command(name="dataflow", words=words, url=endpoints.dataflow)
    further = [
        Command(name=f"partition-{i}", words=(*words, "--partition", str(i)), url=url)
        for i, url in enumerate(endpoints.partitions, start=1)
    ]
    return [home, *further]


class FailedToStart(AssertionError):
    """A service refused to start; the message is its last words."""


class Services:
    """Started by one warm process, each in a session of its own; nothing outlives `close`."""

    def __init__(
        self, commands: Sequence[Command], logs: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self._commands = {command.name: command for command in commands}
        self._logs = logs
        self._pids: dict[str, int] = {}
        self._warm = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(env or {})},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill(name)
        assert self._warm.stdin is not None and self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.wait(timeout=300)
        self._warm.stdout.close()

    @property
    def names(self) -> list[str]:
        return list(self._commands)

    def start(self, name: str) -> int:
        assert name not in self._pids, f"{name} runs already"
        assert self._warm.stdin is not None and self._warm.stdout is not None
        log = self._logs / f"{name}.log"
        self._warm.stdin.write(json.dumps([self._commands[name].words, str(log)]) + "\n")
        self._warm.stdin.flush()
        pid = self._pids[name] = int(self._warm.stdout.readline())
        return pid

    async def start_all(self) -> None:
        for name in self.names:
            self.start(name)
        for name in self.names:
            await self.wait_ready(name)

    def is_alive(self, name: str) -> bool:
        pid = self._pids.get(name)
        return pid is not None and Path(f"/proc/{pid}").exists()

    def require_alive(self) -> None:
        for name in self.names:
            assert self.is_alive(name), f"{name} ended by itself:\n{self.log(name)}"

    def kill(self, name: str) -> None:
        """SIGKILL, and wait until it is gone."""
        pid = self._pids.pop(name, None)
        if pid is None:
            return
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._wait_gone(pid, timeout_s=300.0)

    async def wait_ended(self, name: str, *, timeout_s: float) -> None:
        """It ends by itself."""
        pid = self._pids[name]
        await asyncio.to_thread(self._wait_gone, pid, timeout_s=timeout_s)
        del self._pids[name]

    @staticmethod
    def _wait_gone(pid: int, *, timeout_s: float) -> None:
        give_up_at = time.monotonic() + timeout_s
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < give_up_at, f"process {pid} lives on after {timeout_s:g} s"
            time.sleep(0.002)

    async def wait_ready(self, name: str) -> None:
        url = self._commands[name].url + "/healthz"
        give_up_at = time.monotonic() + READY_S
        async with httpx2.AsyncClient(timeout=60) as http:
            while True:
                if not self.is_alive(name):
                    raise FailedToStart(f"{name} ended at its start:\n{self.log(name)}")
                assert time.monotonic() < give_up_at, f"{name} is not ready after {READY_S:g} s"
                with suppress(httpx2.TransportError):
                    if (await http.get(url, timeout=60.0)).status_code == 200:
                        return
                await asyncio.sleep(0.01)

    def stop(self, name: str) -> None:
        """SIGSTOP, and wait until every thread stands still."""
        pid = self._pids[name]
        os.kill(pid, signal.SIGSTOP)
        give_up_at = time.monotonic() + 90.0
        while any(state not in "TZ" for state in _thread_states(pid)):
            assert time.monotonic() < give_up_at, f"{name} did not stop"
            time.sleep(0.001)

    def resume(self, name: str) -> None:
        os.kill(self._pids[name], signal.SIGCONT)

    def log(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self._logs / f"{name}.log").read_text()[-3000:]
        return ""


def _thread_states(pid: int) -> list[str]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks]
