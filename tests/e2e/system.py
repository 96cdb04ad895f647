# SPDX-License-Identifier: Apache-2.0
"""A real run of real processes, as the tests here hold it: start, look, kill, wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from penstock.dataflow.client.dataflow import StatusClient
from penstock.dataflow.service.operators.messages import Status
from penstock.errors import WireError
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Role

PENSTOCK = (sys.executable, "-m", "penstock.cli.main")
SMALL = (
    "training.steps=10",
    "training.groups_per_batch=8",
    "training.checkpoint_every=4",
    "training.lr_scheduler_type=constant",  # or the number of steps could not change on resume
    "algorithm.num_generations=4",
)
"""Ten steps of 32 trajectories: most of the time goes into importing torch."""
START_S = 600.0


def until(condition: Callable[[], object], *, timeout_s: float, what: str) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, f"{what}: not within {timeout_s:g} s"
        time.sleep(0.1)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def penstock(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PENSTOCK, *words], capture_output=True, text=True, timeout=900, cwd=cwd)


class System:
    """One run folder and the launcher that holds it now."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self._output = path.with_suffix(".out")
        self._seen: set[int] = set()
        self.launcher: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> None:
        """`demo` at the first call, `run` on the same folder later."""
        is_new = not self.folder.config_file.exists()
        first = ("demo", "--dir", str(self.folder.path), *words)
        command = first if is_new else ("run", str(self.folder.path))
        with self._output.open("ab") as out:
            self.launcher = subprocess.Popen(
                [*PENSTOCK, *command, "--headless", "--json"],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def run_file(self, file: Path, *words: str, timeout_s: float) -> None:
        """A run of the file from the folder it stands in, to its good end."""
        output_dir = f"output_dir={self.folder.path.parent}"
        with self._output.open("ab") as out:
            self.launcher = subprocess.Popen(
                [*PENSTOCK, "run", str(file), *words, output_dir, "--headless"],
                cwd=file.parent,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        assert self.wait(timeout_s) == 0, self.output()

    def wait(self, timeout_s: float = 900.0) -> int:
        assert self.launcher is not None
        return self.launcher.wait(timeout_s)

    def output(self) -> str:
        return self._output.read_text()

    def last_line(self) -> dict[str, Any]:
        return json.loads(self.output().splitlines()[-1])

    def status(self) -> Status | None:
        """Asked over HTTP: starting a command takes longer than some of the answers live."""
        token = self.folder.token(self._name, Role.READER, ttl_s=60.0)
        reader = StatusClient(self.folder.endpoints().dataflow, token, patience_s=5.0)
        try:
            return reader.status()
        except WireError:
            return None
        finally:
            reader.close()

    @cached_property
    def _name(self) -> str:
        """Read once: the whole config takes longer than a status."""
        return self.folder.read_config().name

    def step(self) -> int:
        """Committed steps, as the trainer's own lines tell."""
        try:
            lines = self.folder.metrics.read_text().splitlines()
        except FileNotFoundError:
            return 0
        return json.loads(lines[-1])["number"] if lines else 0

    def until_step(self, step: int, timeout_s: float = START_S) -> None:
        def reached() -> bool:
            assert self.launcher is not None
            assert self.launcher.poll() is None, f"ended before step {step}:\n{self.output()}"
            return self.step() >= step

        until(reached, timeout_s=timeout_s, what=f"step {step}")

    def pids(self) -> dict[str, int]:
        path = self.folder.path / "run" / "launcher.json"
        pids: dict[str, int] = json.loads(path.read_bytes())["services"] if path.exists() else {}
        self._seen.update(pids.values())
        return pids

    def kill(self, service: str) -> int:
        pid = self.pids()[service]
        os.kill(pid, signal.SIGKILL)
        return pid

    def until_back(self, service: str, other_than: int) -> None:
        until(
            lambda: self.pids().get(service, other_than) != other_than,
            timeout_s=600.0,
            what=f"{service} starts again",
        )

    def audit(self) -> dict[str, Any]:
        done = penstock("audit", str(self.folder.path), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def until_nothing_is_left(self) -> None:
        self.pids()
        until(lambda: all(map(is_gone, self._seen)), timeout_s=600.0, what="all processes are gone")

    def close(self) -> None:
        if self.launcher is not None and self.launcher.poll() is None:
            self.pids()
            self.launcher.kill()
            self.launcher.wait()
        self.until_nothing_is_left()


@contextmanager
def beside_a_straight_one(folder: Path, name: str) -> Generator[tuple[System, System]]:
    """A run that nothing happens to, and one to compare with it."""
    made = System(folder / "straight"), System(folder / name)
    try:
        yield made
    finally:
        for system in made:
            system.close()


def assert_complete(system: System, *, steps: int) -> None:
    """Finished, nothing lost, nothing trained twice, and the proof of a stranger."""
    assert system.folder.finish() is not None
    report = system.audit()
    assert report["ok"] is True
    summary = report["summary"]
    assert (summary["steps"], summary["lost"], summary["trained_twice"]) == (steps, 0, 0)
    system.until_nothing_is_left()
