# SPDX-License-Identifier: Apache-2.0
"""Polling for effects of other processes, which cannot set an event of ours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

import penstock

SOURCE = str(Path(penstock.__file__).parents[1])


async def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - see the module's docstring
            await asyncio.sleep(0.01)


async def eventually_dead(pid: int) -> None:
    await eventually(lambda: not is_alive(pid))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def pid_in(path: Path) -> int:
    await eventually(lambda: _read(path))
    return int(_read(path))


def _read(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def start_python(code: str) -> subprocess.Popen[bytes]:
    """A process that can import penstock."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": SOURCE},
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
