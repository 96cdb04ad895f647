# SPDX-License-Identifier: Apache-2.0
"""Keeps the processes of a run alive and leaves none behind.

Owns starting, restarting with back-off, giving up and stopping in order. Knows only commands and
exit codes: a Starter starts them, here or on other hosts, and a RunMonitor says whether the run
advances.

The kernel's parent-death signal is tied to the thread that started a child, so one thread makes
all calls here.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.errors import LaunchError
from penstock.fleet.fork_server import ForkServer
from penstock.fleet.launchers.starter import EXIT_HOST_LOST, Child, LocalStarter, Starter
from penstock.fleet.service_tokens import RENEW_S
from penstock.fleet.services import ServiceKind, ServiceSpec

INITIAL_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
BACKOFF_RESET_S = 30.0
"""A process that ran at least this long restarts without back-off."""
MAX_FAILURES = 8
FAILURE_WINDOW_S = 300.0
"""Give up after MAX_FAILURES failures within FAILURE_WINDOW_S if the run made no progress between
them. The window is long enough for eight starts that import torch on a busy machine."""
NODE_RESTART_DELAY_S = 3.0
"""A node that exits with code 0 is restarted after this delay, unless the run has ended."""
NODE_STOP_TIMEOUT_S = 6.0
"""Nodes return their work within two seconds, if the machine is not busy."""
TRAINER_STOP_TIMEOUT_S = 20.0
"""Time for a trainer to finish its step; a killed trainer gets the same batch after a restart."""
SERVER_STOP_TIMEOUT_S = 8.0
POLL_S = 0.05
LOG_TAIL_LINES = 12
EXIT_FENCED = 3
"""A trainer's exit code: another trainer took over its policy. It is not restarted, or the two
would keep replacing each other."""
EXIT_RESUME_REJECTED = 4
"""A trainer's exit code: the ledger rejects its newest checkpoint. Using an older one would discard
work, so the user decides."""
EXIT_DRAINED = 7
"""A node's exit code: an operator drained it. It is not restarted, and its name and devices are not
used again by this launcher."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceExit:
    """A service exited and is about to be restarted."""

    service: str
    code: int
    uptime_s: float
    delay_s: float
    reason: str
    """The last line it logged, if it was not killed."""
    log: Path

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return (
            f"{self.service} {describe_exit(self.code)} after {self.uptime_s:.1f} s{reason}; "
            f"restarting in {self.delay_s:.1f} s (log: {self.log})"
        )


class RunMonitor(Protocol):
    """The state of the run, as far as the launcher needs it."""

    def progress(self) -> int:
        """A number that grows as the run advances."""
        ...

    def is_finished(self) -> bool: ...


@dataclass(slots=True)
class _Supervised:
    """One service and its current process."""

    service: ServiceSpec
    log: Path
    child: Child | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    """When to restart it."""
    delay_s: float = INITIAL_BACKOFF_S
    failures: list[float] = field(default_factory=list[float])
    progress: int = 0
    """Highest progress at any failure, so that a trainer which rewinds does not count as such."""
    is_done: bool = False
    kill_at: float | None = None
    """It was asked to leave for good, and is killed at this time."""


class LocalLauncher:
    """Starts, watches and stops services: those it was made with, and nodes added later."""

    def __init__(
        self,
        services: Sequence[ServiceSpec],
        *,
        log_dir: Path,
        work_dir: Path | None = None,
        on_exit: Callable[[ServiceExit], None],
        monitor: RunMonitor,
        trains: bool = True,
        fork_server: ForkServer | None = None,
        starter: Starter | None = None,
    ) -> None:
        """trains: whether trainers are among the services, or started elsewhere.
        starter: None: children of this process, in `work_dir`, forked where they can be."""
        self.trains = trains
        self._supervised = [
            _Supervised(service, log_dir / f"{service.name}.log") for service in services
        ]
        self._log_dir = log_dir
        self._on_exit = on_exit
        self._monitor = monitor
        self._starter = starter or LocalStarter(work_dir, fork_server=fork_server)
        self._known_pids: dict[str, int] = {}
        self._renew_at = time.time() + RENEW_S
        self.drained: set[str] = set()
        """Nodes that operators drained."""
        self.is_finishing = False
        """Set when the run is complete: nodes that exit are not restarted."""

    def start(self) -> None:
        """Start all services, servers first. Clients wait for their servers."""
        for entry in self._supervised:
            self._start(entry)
        self._known_pids = self.pids()

    def add(self, node: ServiceSpec) -> None:
        """Start one more node, and keep it running."""
        assert node.kind is ServiceKind.NODE and node.name not in self.nodes()
        entry = _Supervised(node, self._log_dir / f"{node.name}.log")
        self._supervised.append(entry)
        self._start(entry)

    def retire(self, name: str) -> None:
        """Tell a node to return its work and leave for good; kill it if it does not. Again has no
        effect."""
        for entry in self._of_kind(ServiceKind.NODE):
            if entry.service.name == name and entry.kill_at is None:
                entry.kill_at = time.monotonic() + NODE_STOP_TIMEOUT_S
                self._signal([entry], signal.SIGTERM)

    def nodes(self) -> dict[str, float]:
        """Nodes that run or are restarted, and for how many seconds they have been running; those
        on their way out included."""
        now = time.monotonic()
        return {
            entry.service.name: 0.0 if entry.child is None else now - entry.started_at
            for entry in self._of_kind(ServiceKind.NODE)
        }

    def poll(self) -> bool:
        """Restart services that exited. Returns True if a process started or exited; raises
        LaunchError if a service keeps failing, or if none can be started any more."""
        self._starter.check()
        changed = False
        now = time.monotonic()
        if time.time() >= self._renew_at:  # by the clock of the tokens, which a suspend advances
            self._renew_tokens()
        for entry in [*self._supervised]:
            if entry.child is None:
                if entry.kill_at is not None:
                    self._supervised.remove(entry)
                    changed = True
                elif not entry.is_done and now >= entry.restart_at:
                    self._restart(entry)
                    changed = True
                continue
            if entry.kill_at is not None and now >= entry.kill_at:
                self._signal([entry], signal.SIGKILL)
            code = self._reap(entry)
            if code is not None:
                changed = True
                self._handle_exit(entry, code, now)
        before, self._known_pids = self._known_pids, self.pids()
        return changed or before != self._known_pids  # or one has got its place

    def has_finished_training(self) -> bool:
        """Every trainer exited with code 0; False if they are started elsewhere."""
        return self.trains and all(entry.is_done for entry in self._of_kind(ServiceKind.TRAINER))

    def pids(self) -> dict[str, int]:
        """Of the services on this machine."""
        found = {e.service.name: e.child.pid for e in self._supervised if e.child is not None}
        return {name: pid for name, pid in found.items() if pid is not None}

    def logs(self) -> dict[str, Path]:
        return {entry.service.name: entry.log for entry in self._supervised}

    def restart(self, service: str) -> bool:
        """Kill a service, on all of its hosts, or start it again if it has exited; `poll()` starts
        it. False if it is none of these."""
        found = [e for e in self._supervised if e.service.name.partition("@")[0] == service]
        for entry in found:
            self._signal([entry], signal.SIGKILL)
            if entry.child is None:
                entry.is_done, entry.restart_at = False, 0.0
        return bool(found)

    def wait_for_nodes(self, timeout_s: float) -> None:
        """Let nodes exit by themselves at the end of a run."""
        self.is_finishing = True
        self._wait(self._of_kind(ServiceKind.NODE), timeout_s)

    def stop(self, *, trainer_timeout_s: float = TRAINER_STOP_TIMEOUT_S) -> None:
        """Stop gracefully: nodes return their work and trainers finish their step, then servers
        stop."""
        self.is_finishing = True
        workers = [*self._of_kind(ServiceKind.NODE), *self._of_kind(ServiceKind.TRAINER)]
        self._signal(workers, signal.SIGTERM)
        self._wait(self._of_kind(ServiceKind.NODE), NODE_STOP_TIMEOUT_S)
        self._signal(self._of_kind(ServiceKind.NODE), signal.SIGKILL)
        self._wait(workers, trainer_timeout_s)
        self._signal(workers, signal.SIGKILL)
        for server in reversed(self._of_kind(ServiceKind.SERVER)):
            self._signal([server], signal.SIGTERM)
            self._wait([server], SERVER_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """Kill all process groups; none is left when this returns."""
        running = [entry for entry in self._supervised if entry.child is not None]
        self._signal(running, signal.SIGKILL)
        self._wait(running, timeout_s=60.0)
        self._starter.close()

    # --- one process ------------------------------------------------------------------------------

    def _start(self, entry: _Supervised) -> None:
        entry.child = self._starter.start(entry.service, entry.log)
        entry.started_at = time.monotonic()

    def _renew_tokens(self) -> None:
        self._renew_at = time.time() + RENEW_S
        for entry in self._supervised:
            with suppress(OSError):  # a full disk; the old token is valid for some time yet
                entry.service.renew_token()

    def _restart(self, entry: _Supervised) -> None:
        if entry.service.kind is ServiceKind.NODE and self._is_run_over():
            entry.is_done = True
        else:
            self._start(entry)

    def _reap(self, entry: _Supervised) -> int | None:
        assert entry.child is not None
        code = entry.child.exit_code()
        if code is not None:
            entry.child = None
        return code

    def _handle_exit(self, entry: _Supervised, code: int, now: float) -> None:
        kind = entry.service.kind
        if entry.kill_at is not None:
            self._supervised.remove(entry)
            return
        if code == 0 and kind is ServiceKind.TRAINER:
            entry.is_done = True
            return
        if code == EXIT_DRAINED and kind is ServiceKind.NODE:
            self.drained.add(entry.service.name)
            self._supervised.remove(entry)
            return
        if code == 0 and kind is ServiceKind.NODE:
            entry.restart_at = now + NODE_RESTART_DELAY_S
            return
        if code == EXIT_FENCED and kind is ServiceKind.TRAINER:
            raise LaunchError(
                f"{entry.service.name} exited because another trainer took over its policy. Stop "
                f"the other trainer, then run again (log: {entry.log})"
            )
        if code == EXIT_RESUME_REJECTED and kind is ServiceKind.TRAINER:
            raise LaunchError(
                f"{entry.service.name} cannot resume: the ledger rejects its newest checkpoint. "
                f"The end of {entry.log} says why:\n{log_tail(entry.log)}"
            )
        uptime_s = now - entry.started_at
        if uptime_s >= BACKOFF_RESET_S:
            entry.delay_s = INITIAL_BACKOFF_S
        if code != EXIT_HOST_LOST:
            self._count_failure(entry, code, now)
        entry.restart_at = now + entry.delay_s
        self._on_exit(
            ServiceExit(
                service=entry.service.name,
                code=code,
                uptime_s=uptime_s,
                delay_s=entry.delay_s,
                reason=_reason(entry.log, code),
                log=entry.log,
            )
        )
        entry.delay_s = min(MAX_BACKOFF_S, entry.delay_s * 2)

    def _count_failure(self, entry: _Supervised, code: int, now: float) -> None:
        progress = self._monitor.progress()
        if progress > entry.progress:
            entry.failures.clear()
        entry.progress = max(entry.progress, progress)
        entry.failures = [at for at in entry.failures if now - at < FAILURE_WINDOW_S] + [now]
        if len(entry.failures) >= MAX_FAILURES:
            raise LaunchError(
                f"{entry.service.name} {describe_exit(code)}: {MAX_FAILURES} failures without "
                f"progress of the run; giving up. The end of {entry.log}:\n{log_tail(entry.log)}"
            )

    def _is_run_over(self) -> bool:
        has_trainers = bool(self._of_kind(ServiceKind.TRAINER))
        is_trained = has_trainers and self.has_finished_training()
        return self.is_finishing or is_trained or self._monitor.is_finished()

    # --- all processes ----------------------------------------------------------------------------

    def _of_kind(self, kind: ServiceKind) -> list[_Supervised]:
        return [entry for entry in self._supervised if entry.service.kind is kind]

    def _signal(self, entries: Iterable[_Supervised], number: signal.Signals) -> None:
        for entry in entries:
            if entry.child is None:
                continue
            if number is signal.SIGKILL:
                entry.child.kill()
            else:
                entry.child.terminate()

    def _wait(self, entries: Sequence[_Supervised], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(entry.child is not None and self._reap(entry) is None for entry in entries):
            if time.monotonic() > deadline:
                return
            time.sleep(POLL_S)


def describe_exit(code: int) -> str:
    """`exited with code 1`, or `was killed by SIGKILL`."""
    if code == EXIT_HOST_LOST:
        return "lost its host"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _reason(log: Path, code: int) -> str:
    """What the service said last, if it ended by itself."""
    return log_tail(log, 1).strip()[:200] if 0 < code < EXIT_HOST_LOST else ""


def log_tail(log: Path, num_lines: int = LOG_TAIL_LINES) -> str:
    """The end of a log, indented, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 32_768))
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    lines = text.splitlines()[-num_lines:]
    return "\n".join(f"    {line[:500]}" for line in lines) or "    (empty)"
