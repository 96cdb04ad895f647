# SPDX-License-Identifier: Apache-2.0
"""TransferQueue in an environment of its own, built once, and a process of it that takes orders."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cache import CACHE
from benchmarks.harness import ROOT, log_line

VERSION = "0.1.11"
TORCH = "torch==2.13.0"
"""First and with pip: a range may bring gigabytes of CUDA libraries."""
SECRET = secrets.token_hex(32)
"""Of this run's own cluster: Ray would else draw one and keep it in the user's home."""
SCRIPT = ROOT / "benchmarks" / "baselines" / "transferqueue.py"


def environment() -> Path:
    """Its interpreter; the first call installs it."""
    folder = CACHE / "transferqueue"
    done = folder / f"installed-{VERSION}"
    python = folder / "bin" / "python"
    if not done.exists():
        log_line(f"installing TransferQueue {VERSION} into {folder}; once, some minutes")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        for what in (TORCH, f"TransferQueue=={VERSION}"):
            subprocess.run([str(python), "-m", "pip", "install", "--quiet", what], check=True)
        done.touch()
    return python


class TransferQueue:
    """One process: the first brings the cluster up, others join it."""

    def __init__(self, child: subprocess.Popen[str], log: Path) -> None:
        self._child = child
        self._log = log
        self.cluster = ""
        while not self.cluster:  # libraries may speak on stdout before it is ready
            word, _, rest = self._line().partition(" ")
            self.cluster = rest if word == "ready" else ""

    def _line(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"TransferQueue ended:\n{self._log.read_text()[-3000:]}")
        return line.strip()

    def _ask(self, *order: Any) -> float:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()
        return json.loads(self._line())

    def run(self, what: str, keys: Sequence[str], size: int, batch: int, connections: int) -> float:
        """`put`, `get` or `clear` all keys, so many per call; seconds."""
        return self._ask(what, list(keys), size, batch, connections)

    def fetch(self, batch: int) -> int:
        """As a consumer: how many rows it got that no consumer of this name had before."""
        return int(self._ask("fetch", batch))

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()


@contextlib.contextmanager
def transferqueue(python: Path, folder: Path, cluster: str = "") -> Generator[TransferQueue]:
    log = folder / f"transferqueue-{'joined' if cluster else 'first'}.log"
    with log.open("w") as out:
        child = subprocess.Popen(
            [str(python), str(SCRIPT), *([cluster] if cluster else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=out,
            text=True,
            env={
                **os.environ,
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": SECRET,
                "RAY_USAGE_STATS_ENABLED": "0",
                "OMP_NUM_THREADS": "1",
            },
        )
    try:
        yield TransferQueue(child, log)
    finally:
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.close()  # it ends by itself, and takes its cluster with it
        try:
            child.wait(timeout=60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()
