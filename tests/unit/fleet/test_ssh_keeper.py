# SPDX-License-Identifier: Apache-2.0
"""A service at the other end of a connection, here a pipe: signals, its code, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

KEEPER = (sys.executable, "-m", "penstock.fleet.launchers.ssh_keeper")
SERVICE = """
import os, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
print(os.getpid(), child.pid, os.environ["OWN"], os.getcwd(), flush=True)
time.sleep(600)
"""


@contextmanager
def kept(work_dir: Path) -> Generator[tuple[subprocess.Popen[bytes], list[str]]]:
    """A keeper, and what its service said first."""
    keeper = subprocess.Popen(KEEPER, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert keeper.stdin is not None and keeper.stdout is not None
    command = [sys.executable, "-c", SERVICE]
    order = {"command": command, "env": {"OWN": "yes"}, "work_dir": str(work_dir)}
    try:
        keeper.stdin.write(json.dumps(order).encode() + b"\n")
        keeper.stdin.flush()
        yield keeper, keeper.stdout.readline().decode().split()
    finally:
        keeper.kill()
        keeper.communicate()


def wait_until_gone(*pids: str) -> None:
    running = [psutil.Process(int(pid)) for pid in pids if psutil.pid_exists(int(pid))]
    _, alive = psutil.wait_procs(running, timeout=120)
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize(
    ("line", "code"), [(b"TERM\n", 7), (b"KILL\n", 128 + 9), (None, 128 + 9)], ids=str
)
def test_a_signal_ends_the_service_and_its_children(
    tmp_path: Path, line: bytes | None, code: int
) -> None:
    """None: the connection is lost."""
    with kept(tmp_path) as (keeper, (service, child, own, cwd)):
        assert (own, cwd) == ("yes", os.path.realpath(tmp_path))
        assert keeper.stdin is not None
        if line is None:
            keeper.stdin.close()
            keeper.stdin = None
        else:
            keeper.stdin.write(line)
            keeper.stdin.flush()
        assert keeper.wait(timeout=120) == code
        wait_until_gone(service, child)


def test_a_killed_keeper_leaves_nothing(tmp_path: Path) -> None:
    with kept(tmp_path) as (keeper, (service, child, *_)):
        keeper.kill()
        wait_until_gone(service, child)
