# SPDX-License-Identifier: Apache-2.0
"""Two hosts: network namespaces with one cable between them."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.system import PENSTOCK

NEEDS_NAMESPACES = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="makes network namespaces"
    ),
]
HERE, THERE = "10.77.19.1", "10.77.19.2"
BESIDE, THIRD = "10.77.20.1", "10.77.20.2"
"""A second cable of the first host, and the host at its other end."""
LONG_S = 300.0


@contextmanager
def ended(process: subprocess.Popen[Any]) -> Generator[subprocess.Popen[Any]]:
    """Told to end when the block ends, and killed if it does not."""
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Host:
    """One network namespace."""

    def __init__(self, name: str, cable: str, log: Path) -> None:
        self.name, self.log, self._cable = name, log, cable

    @contextmanager
    def cut_off(self) -> Generator[None]:
        """Without its cable, until the block ends."""
        ip("-n", self.name, "link", "set", self._cable, "down")
        try:
            yield
        finally:
            ip("-n", self.name, "link", "set", self._cable, "up")

    def die(self) -> None:
        """Without a word to anybody: no packet of its processes leaves it any more."""
        ip("-n", self.name, "link", "set", self._cable, "down")
        words = ("ip", "netns", "pids", self.name)
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        for pid in map(int, found.split()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._inside(*words), capture_output=True, text=True, timeout=LONG_S, env=_env(env)
        )

    @contextmanager
    def running(self, *words: str, **env: str) -> Generator[subprocess.Popen[bytes]]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                self._inside(*words), stdout=log, stderr=log, env=_env(env), cwd=self.log.parent
            )
        with ended(process):
            yield process

    def _inside(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *PENSTOCK, *words]


def _env(more: dict[str, str]) -> dict[str, str]:
    """What this process trusts by now is not for its children."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return {**own, "OMP_NUM_THREADS": "1", **more}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _connect(ends: Sequence[tuple[str, str, str]]) -> None:
    """A cable between two namespaces: of each its name, its end of the cable and its address."""
    ip("link", "add", ends[0][1], "type", "veth", "peer", "name", ends[1][1])
    for name, cable, address in ends:
        ip("link", "set", cable, "netns", name)
        ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
        ip("-n", name, "link", "set", cable, "up")
        ip("-n", name, "link", "set", "lo", "up")


@contextmanager
def _namespaces(letters: str) -> Generator[list[str]]:
    names = [f"penstock-{os.getpid()}-{letter}" for letter in letters]
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        yield names


@pytest.fixture
def hosts(tmp_path: Path) -> Generator[tuple[Host, Host]]:
    cables = [f"ps{os.getpid()}{letter}" for letter in "ab"]
    with _namespaces("ab") as names:
        _connect([*zip(names, cables, (HERE, THERE), strict=True)])
        logs = (tmp_path / "here.log", tmp_path / "there.log")
        yield Host(names[0], cables[0], logs[0]), Host(names[1], cables[1], logs[1])


@pytest.fixture
def third(hosts: tuple[Host, Host], tmp_path: Path) -> Generator[Host]:
    """Reaches the first of the others."""
    cables = [f"ps{os.getpid()}{letter}" for letter in "cd"]
    with _namespaces("c") as [name]:
        _connect([*zip((hosts[0].name, name), cables, (BESIDE, THIRD), strict=True)])
        ip("-n", name, "route", "add", HERE, "via", BESIDE)
        yield Host(name, cables[1], tmp_path / "third.log")
