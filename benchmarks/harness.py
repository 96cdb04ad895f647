# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: servers as processes of their own, a load of so many connections,
percentiles, and the one line of JSON at the end. Knows nothing of what is measured."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil

ROOT = Path(__file__).parent.parent
CONNECTIONS = 16
MIN_PAIRS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One timed load."""

    calls: int
    seconds: float
    cpu_s: float
    """Of the server, in all its threads: what the figure is when others use this machine too."""
    latencies_s: Sequence[float] = field(repr=False)

    @property
    def calls_per_s(self) -> float:
        return self.calls / self.seconds

    def percentile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One process under load."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return times.user + times.system


def _python_path() -> str:
    inherited = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [inherited])])


@contextlib.contextmanager
def process(module: str, *arguments: str) -> Generator[Server]:
    """A server in its own process, until the block ends; its first line on stdout is its URL."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": _python_path()},
    )
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        if not url:
            raise RuntimeError(f"{module} ended before it said its URL; see its messages above")
        yield Server(url=url, pid=child.pid)
    finally:
        child.terminate()
        try:
            child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


@contextlib.contextmanager
def scratch(parent: Path | None) -> Generator[Path]:
    """A folder for what is written; on a real disk, or fsync costs nothing and means nothing."""
    with TemporaryDirectory(prefix="penstock-bench-", dir=parent) as name:
        yield Path(name)


async def load(
    server: Server,
    calls: Sequence[Callable[[], Awaitable[None]]],
    *,
    connections: int = CONNECTIONS,
) -> Round:
    """Make all calls, so many at a time; every connection starts its next as soon as one ends."""
    waiting = iter(calls)
    latencies_s: list[float] = []

    async def connection() -> None:
        for call in waiting:
            began_at = time.perf_counter()
            await call()
            latencies_s.append(time.perf_counter() - began_at)

    gc.collect()
    gc.disable()
    cpu_s = server.cpu_s()
    began_at = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(connections):
                group.create_task(connection())
        seconds = time.perf_counter() - began_at
    finally:
        gc.enable()
    return Round(
        calls=len(calls),
        seconds=seconds,
        cpu_s=server.cpu_s() - cpu_s,
        latencies_s=latencies_s,
    )


def log_line(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def result(**figures: float | str | int) -> None:
    """The last line on stdout."""
    rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in figures.items()}
    print(json.dumps(rounded), flush=True)
