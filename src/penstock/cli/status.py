# SPDX-License-Identifier: Apache-2.0
"""`penstock status`: the state of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.dataflow.service.operators.messages import Status
    from penstock.fleet.run_folder import RunFolder


def status(run: Path, /, *, json: bool = False) -> int:
    """Show a run's state and what it is waiting for.

    Args:
        run: Run folder, or its config file.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    pid = folder.launcher_pid()
    finish = folder.finish()
    now, why = _read_status(folder) if pid is not None else (None, "")
    if json:
        print_json(
            {
                "run": str(folder.path),
                "running": pid is not None,
                "pid": pid,
                "finished": finish is not None,
                "status": now,
            }
        )
        return 0
    if now is not None:
        _draw(folder, now, hint=f"`penstock stop {run}` stops it")
    elif pid is not None:
        print(f"running (pid {pid}), but the dataflow does not answer: {why}")
    elif finish is not None:
        print(f"finished: {finish.steps} steps, {finish.trajectories:,} trajectories")
    else:
        print(f"not running; `penstock run {run}` resumes it")
    return 0


def _read_status(folder: RunFolder) -> tuple[Status | None, str]:
    from penstock.errors import WireError
    from penstock.runs.control import read_status

    try:
        return read_status(folder), ""
    except WireError as error:
        return None, str(error)


def _draw(folder: RunFolder, now: Status, *, hint: str) -> None:
    from rich.console import Console

    from penstock.cli.live_panel import draw
    from penstock.runs.monitor import RunView

    console = Console()
    console.print(draw(RunView.from_status(now), console.width, hint))
    console.print(f"logs: {folder.logs / 'latest'}", highlight=False, soft_wrap=True)
