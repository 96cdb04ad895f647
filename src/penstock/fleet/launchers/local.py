# SPDX-License-Identifier: Apache-2.0
"""Keeps the processes of a run alive on this machine, and leaves none behind.

Owns starting, restarting with back-off, giving up and stopping in order. Knows commands and exit
codes; what a service does, and whether the run as a whole advances, it is told.

Only the thread that made a child keeps it alive (the kernel's parent-death signal belongs to the
thread), so one thread makes all calls here.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from penstock.errors import LaunchError
from penstock.fleet import processes
from penstock.fleet.services import Kind, Service

FIRST_DELAY_S = 0.2
MAX_DELAY_S = 10.0
HEALTHY_S = 30.0
"""A child that lived so long starts again without delay."""
MAX_FAILURES = 8
FAILURES_WINDOW_S = 300.0
"""So many failures within so long, and no progress of the run between them: it will not get better.
Long enough for eight starts that import torch on a busy machine."""
LEFT_S = 3.0
"""A node that ended well was told to leave. If the run is not over by then, it is called back."""
DRAIN_S = 6.0
"""Nodes promise to hand back what they hold within five seconds."""
COMMIT_S = 20.0
"""A trainer finishes the step it has begun, or is stopped: the batch comes again."""
SERVER_S = 8.0
POLL_S = 0.05
LAST_LINES = 12
EXIT_FENCED = 3
"""Of a trainer: another one took over its policy. Starting it again would take the policy back, and
the two would go on replacing each other."""
EXIT_REFUSED = 4
"""Of a trainer: the ledger refuses to go on from its newest checkpoint. To go back to an older one
would be to throw work away, so people decide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A service ended and is about to be started again."""

    service: str
    code: int
    lived_s: float
    delay_s: float
    why: str
    """The last line it wrote, if it ended by itself."""
    log: Path

    def __str__(self) -> str:
        why = f": {self.why}" if self.why else ""
        return (
            f"{self.service} {describe_exit(self.code)} after {self.lived_s:.1f} s{why}; "
            f"starting it again in {self.delay_s:.1f} s (log: {self.log})"
        )


class RunView(Protocol):
    """What the launcher is told of the run as a whole."""

    def progress(self) -> int:
        """Any number that grows while the run advances."""
        ...

    def is_finished(self) -> bool: ...


@dataclass(slots=True)
class _Slot:
    """One service and its present child."""

    service: Service
    log: Path
    child: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    start_at: float = 0.0
    """When to start it again."""
    delay_s: float = FIRST_DELAY_S
    failures: list[float] = field(default_factory=list[float])
    progress: int = 0
    """The most the run had advanced at any failure; a trainer that rewinds gains nothing by it."""
    is_done: bool = False


class LocalLauncher:
    """Starts, watches and stops a fixed list of services."""

    def __init__(
        self,
        services: Sequence[Service],
        *,
        log_dir: Path,
        work_dir: Path | None = None,
        on_death: Callable[[Death], None],
        view: RunView,
    ) -> None:
        self._slots = [_Slot(service, log_dir / f"{service.name}.log") for service in services]
        self._work_dir = work_dir
        self._on_death = on_death
        self._view = view
        self._guard = processes.Guard()
        self.is_finishing = False
        """Set when the run is complete: nodes that leave are not called back."""

    def start(self) -> None:
        """Start everything at once: importing torch takes long, and clients wait for their
        servers."""
        for slot in self._slots:
            self._start(slot)

    def poll(self) -> bool:
        """Restart what died; True when a child was started or ended. LaunchError when one cannot
        live."""
        changed = False
        now = time.monotonic()
        for slot in self._slots:
            if slot.child is None:
                if not slot.is_done and now >= slot.start_at:
                    self._start_again(slot)
                    changed = True
                continue
            code = self._reap(slot)
            if code is not None:
                changed = True
                self._after_exit(slot, code, now)
        return changed

    def is_trained(self) -> bool:
        """Every trainer said that its policy is done."""
        return all(slot.is_done for slot in self._slots if slot.service.kind is Kind.TRAINER)

    def pids(self) -> dict[str, int]:
        return {slot.service.name: slot.child.pid for slot in self._slots if slot.child is not None}

    def logs(self) -> dict[str, Path]:
        return {slot.service.name: slot.log for slot in self._slots}

    def wait_nodes(self, timeout_s: float) -> None:
        """Let nodes leave by themselves, as the end of a run tells them to."""
        self.is_finishing = True
        self._wait(self._of(Kind.NODE), timeout_s)

    def stop(self) -> None:
        """Nodes hand back and trainers finish their step while the servers answer; servers end
        last."""
        self.is_finishing = True
        workers = [*self._of(Kind.NODE), *self._of(Kind.TRAINER)]
        self._signal(workers, signal.SIGTERM)
        self._wait(self._of(Kind.NODE), DRAIN_S)
        self._signal(self._of(Kind.NODE), signal.SIGKILL)
        self._wait(workers, COMMIT_S)
        self._signal(workers, signal.SIGKILL)
        for server in reversed(self._of(Kind.SERVER)):
            self._signal([server], signal.SIGTERM)
            self._wait([server], SERVER_S)
        self.kill()

    def kill(self) -> None:
        """End everything at once, whole groups; nothing of ours runs when this returns."""
        running = [slot for slot in self._slots if slot.child is not None]
        self._signal(running, signal.SIGKILL)
        self._wait(running, timeout_s=60.0)
        self._guard.close()

    # --- one child --------------------------------------------------------------------------------

    def _start(self, slot: _Slot) -> None:
        try:
            slot.child = processes.start(
                slot.service.command,
                env=slot.service.make_env(),
                cwd=self._work_dir,
                log=slot.log,
            )
        except OSError as error:
            raise LaunchError(f"cannot start {slot.service.name}: {error}") from error
        self._guard.add(slot.child.pid)
        slot.started_at = time.monotonic()

    def _start_again(self, slot: _Slot) -> None:
        if slot.service.kind is Kind.NODE and self._is_over():
            slot.is_done = True
        else:
            self._start(slot)

    def _reap(self, slot: _Slot) -> int | None:
        assert slot.child is not None
        code = processes.reap(slot.child)
        if code is not None:
            self._guard.remove(slot.child.pid)
            slot.child = None
        return code

    def _after_exit(self, slot: _Slot, code: int, now: float) -> None:
        kind = slot.service.kind
        if code == 0 and kind is Kind.TRAINER:
            slot.is_done = True
            return
        if code == 0 and kind is Kind.NODE:
            slot.start_at = now + LEFT_S
            return
        if code == EXIT_FENCED and kind is Kind.TRAINER:
            raise LaunchError(
                f"{slot.service.name} ended because another trainer took over its policy; this run "
                "does not take it back. Stop the other trainer, then run again (log: "
                f"{slot.log})"
            )
        if code == EXIT_REFUSED and kind is Kind.TRAINER:
            raise LaunchError(
                f"{slot.service.name} ended because the ledger refuses to go on from its newest "
                "checkpoint; starting it again would change nothing. Its log, "
                f"{slot.log}, ends:\n{last_lines(slot.log)}"
            )
        lived_s = now - slot.started_at
        if lived_s >= HEALTHY_S:
            slot.delay_s = FIRST_DELAY_S
        self._count_failure(slot, code, now)
        slot.start_at = now + slot.delay_s
        self._on_death(
            Death(
                service=slot.service.name,
                code=code,
                lived_s=lived_s,
                delay_s=slot.delay_s,
                why=last_lines(slot.log, 1).strip()[:200] if code > 0 else "",
                log=slot.log,
            )
        )
        slot.delay_s = min(MAX_DELAY_S, slot.delay_s * 2)

    def _count_failure(self, slot: _Slot, code: int, now: float) -> None:
        progress = self._view.progress()
        if progress > slot.progress:
            slot.failures.clear()
        slot.progress = max(slot.progress, progress)
        slot.failures = [at for at in slot.failures if now - at < FAILURES_WINDOW_S] + [now]
        if len(slot.failures) >= MAX_FAILURES:
            raise LaunchError(
                f"{slot.service.name} {describe_exit(code)}, for the {MAX_FAILURES}th time without "
                "any progress of the run between; it would not get better by itself. Its log, "
                f"{slot.log}, ends:\n{last_lines(slot.log)}"
            )

    def _is_over(self) -> bool:
        has_trainers = bool(self._of(Kind.TRAINER))
        is_trained = has_trainers and self.is_trained()
        return self.is_finishing or is_trained or self._view.is_finished()

    # --- many children ----------------------------------------------------------------------------

    def _of(self, kind: Kind) -> list[_Slot]:
        return [slot for slot in self._slots if slot.service.kind is kind]

    def _signal(self, slots: Iterable[_Slot], number: signal.Signals) -> None:
        for slot in slots:
            if slot.child is None:
                continue
            if number is signal.SIGKILL:
                processes.signal_group(slot.child.pid, number)
            else:
                slot.child.send_signal(number)  # the service itself tells its own children

    def _wait(self, slots: Sequence[_Slot], timeout_s: float) -> None:
        give_up_at = time.monotonic() + timeout_s
        while any(slot.child is not None and self._reap(slot) is None for slot in slots):
            if time.monotonic() > give_up_at:
                return
            time.sleep(POLL_S)


def describe_exit(code: int) -> str:
    """`ended with exit code 1`, or `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def last_lines(log: Path, num_lines: int = LAST_LINES) -> str:
    """The end of a log, indented, for an error message."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 32_768))
            text = file.read().decode(errors="replace")
    except OSError:
        text = ""
    lines = text.splitlines()[-num_lines:]
    return "\n".join(f"    {line[:500]}" for line in lines) or "    (nothing)"
