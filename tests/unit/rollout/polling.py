# SPDX-License-Identifier: Apache-2.0
"""Polling for effects of other processes, which cannot set an event of ours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

import penstock

SOURCE = str(Path(penstock.__file__).parents[1])
PATHS = (SOURCE, str(Path(__file__).parents[3]))


async def eventually(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - see the module's docstring
            await asyncio.sleep(0.01)


async def eventually_dead(pid: int) -> None:
    await eventually(lambda: not is_alive(pid))


def running(word: str, parent: int | None = None) -> list[psutil.Process]:
    """Descendants that were started with this word, also inside sandboxes."""
    found: list[psutil.Process] = []
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.Error):  # it may have ended in the meantime
            found += [child] if word in child.cmdline() else []
    return found


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
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
    )


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
