# SPDX-License-Identifier: Apache-2.0
"""The state of a run, live or not: asks its dataflow service, and answers from the run's files when
no service does.

Owns the difference between running, finished, stopped, failed and killed. Changes nothing."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, WireError
from penstock.runs.control import read_status
from penstock.runs.last_evaluation import has_last_evaluation
from penstock.runs.progress import RunProgress, progress_of, read_progress

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.dataflow.service.operators.messages import Status
    from penstock.fleet.run_folder import RunFolder

DIRECT_PATIENCE_S = 0.0
"""Without a launcher the services are probably down: one attempt, no retry."""


class RunState(StrEnum):
    NEW = "new"
    """Never started."""
    RUNNING = "running"
    """A launcher supervises it, or its dataflow service answers."""
    FINISHED = "finished"
    """Every policy has trained its last step."""
    STOPPED = "stopped"
    """Stopped in order by a signal, such as Ctrl-C or `penstock stop`, or by a spent budget."""
    FAILED = "failed"
    """An error ended it."""
    KILLED = "killed"
    """Its launcher ended without a record: killed, or the machine went down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run at one moment."""

    name: str
    state: RunState
    pid: int | None
    """Of the launcher; None if none is running."""
    progress: RunProgress
    started_at: float | None
    """Start of the last launch, in Unix seconds; None if no launcher ever started it."""
    ended_at: float | None
    """When it ended, or its last sign of life; None while it is running."""
    why: str
    """Why it ended before its last step, or why a running one does not answer; else empty."""
    status: Status | None
    """The answer of its dataflow service; None if it gave none."""


def read_summary(folder: RunFolder, config: RunConfig | None = None) -> RunSummary:
    """The state of a run. An unreachable service is an answer too, never an error. `config`: its
    config, if the caller has read it."""
    config = config or folder.read_config()
    launcher, pid = folder.launcher(), folder.launcher_pid()
    status, error = _ask(folder, config.name, has_launcher=pid is not None)
    if status is not None:
        progress = progress_of(status, time.time())
    else:
        progress = read_progress(folder, config)
    is_live = pid is not None or status is not None
    is_complete = progress.is_complete and has_last_evaluation(folder.path, config, progress.step)
    state, ended_at, why = _ending(folder, progress, is_complete=is_complete)
    return RunSummary(
        name=config.name,
        state=RunState.RUNNING if is_live else state,
        pid=pid,
        progress=progress,
        started_at=None if launcher is None else launcher.started_at,
        ended_at=None if is_live else ended_at,
        why=error if is_live else why,
        status=status,
    )


def _ask(folder: RunFolder, run: str, *, has_launcher: bool) -> tuple[Status | None, str]:
    """The status of the run's dataflow service, or why there is none."""
    try:
        if has_launcher:
            return read_status(folder, run=run), ""
        return read_status(folder, run=run, patience_s=DIRECT_PATIENCE_S), ""
    except (WireError, ConfigError) as error:
        return None, str(error)


def _ending(
    folder: RunFolder, progress: RunProgress, *, is_complete: bool
) -> tuple[RunState, float | None, str]:
    """State, time and reason of a run that is not running."""
    finish, end, launcher = folder.finish(), folder.end(), folder.launcher()
    last_at = progress.at or (launcher.started_at if launcher else None)
    if finish is not None:
        return RunState.FINISHED, finish.finished_at, ""
    if is_complete:
        return RunState.FINISHED, last_at, ""
    if end is not None and end.error:
        return RunState.FAILED, end.ended_at, end.error
    if end is not None:
        return RunState.STOPPED, end.ended_at, end.budget or signal_name(end.signal)
    if launcher is None and not progress.at:
        return RunState.NEW, None, ""
    if launcher is None:
        return RunState.KILLED, last_at, "its services were started one by one; none answers"
    return RunState.KILLED, last_at, "its launcher ended without a record of a stop"


def signal_name(number: int) -> str:
    """`SIGTERM`, or `signal 99`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
