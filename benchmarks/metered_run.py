# SPDX-License-Identifier: Apache-2.0
"""A training run as a command with all its processes: processor time, memory and time, from outside
and the same way for every system. Knows of a run only the file to which it adds a line per step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

_POLL_S = 0.05
_MEMORY_EVERY_S = 1.0
DEADLINE_S = 900.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """As seen within a twentieth of a second."""

    seconds: float
    """Since the start."""
    cpu_s: float
    """Of all processes, ended ones included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metered:
    first: Moment
    """When the first step's line was there."""
    last: Moment
    """When the last one's was."""
    end: Moment
    peak_mb: float
    """Memory of all processes at once; a page that several share is counted once."""
    lines: Sequence[Mapping[str, Any]] = field(repr=False)


class Run:
    """The processes of one command, from its start on."""

    def __init__(
        self, command: Sequence[str], metrics: Path, log: Path, env: Mapping[str, str]
    ) -> None:
        self._metrics = metrics
        self._log = log
        self._num_before = len(read_lines(metrics))
        self._began_at = time.monotonic()
        with log.open("ab") as out:
            self._child = subprocess.Popen(
                command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env={**env}
            )
        self._root = psutil.Process(self._child.pid)
        self.peak_mb = 0.0
        self._weighed_at = 0.0

    def wait(self, num_lines: int) -> Moment:
        """Until the run has added this many lines."""
        while len(read_lines(self._metrics)) - self._num_before < num_lines:
            if self._child.poll() is not None:
                raise RuntimeError(f"the run ended early:\n{self._log.read_text()[-3000:]}")
            self._pause()
        return self.moment()

    def wait_for_end(self) -> Moment:
        while True:
            pid, status, usage = os.wait4(self._child.pid, os.WNOHANG)
            if pid:
                break
            self._pause()
        self._child.returncode = os.waitstatus_to_exitcode(status)
        if self._child.returncode:
            raise RuntimeError(f"the run failed:\n{self._log.read_text()[-3000:]}")
        return Moment(
            seconds=time.monotonic() - self._began_at, cpu_s=usage.ru_utime + usage.ru_stime
        )

    def moment(self) -> Moment:
        cpu_s = 0.0
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                cpu_s += sum(process.cpu_times()[:4])  # its own, and of children it waited for
        return Moment(seconds=time.monotonic() - self._began_at, cpu_s=cpu_s)

    @property
    def is_alive(self) -> bool:
        return self._child.poll() is None

    def kill(self) -> None:
        """All processes at once, as a power failure would."""
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._child.wait()

    def _processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return [self._root, *self._root.children(recursive=True)]
        return []

    def _pause(self) -> None:
        now = time.monotonic()
        if now - self._began_at > DEADLINE_S:
            raise RuntimeError(f"the run takes longer than {DEADLINE_S:.0f} s; see {self._log}")
        if now - self._weighed_at > _MEMORY_EVERY_S:
            self._weighed_at = now
            self.peak_mb = max(self.peak_mb, sum(map(_mb, self._processes())))
        time.sleep(_POLL_S)


def _mb(process: psutil.Process) -> float:
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return process.memory_full_info().pss / 2**20
    return 0.0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Those that are complete."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text().rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


@contextlib.contextmanager
def running(
    command: Sequence[str], metrics: Path, log: Path, env: Mapping[str, str]
) -> Generator[Run]:
    log.parent.mkdir(parents=True, exist_ok=True)
    run = Run(command, metrics, log, env)
    try:
        yield run
    finally:
        if run.is_alive:
            run.kill()


def metered(
    command: Sequence[str], metrics: Path, log: Path, *, steps: int, env: Mapping[str, str]
) -> Metered:
    """The run, to its end."""
    with running(command, metrics, log, env) as run:
        first = run.wait(1)
        last = run.wait(steps)
        end = run.wait_for_end()
        return Metered(
            first=first, last=last, end=end, peak_mb=run.peak_mb, lines=read_lines(metrics)
        )
