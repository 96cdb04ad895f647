# SPDX-License-Identifier: Apache-2.0
"""`penstock status`: what a run does now."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.dataflow.service.operators.messages import Status
    from penstock.fleet.run_folder import RunFolder


def status(run: Path, /, *, json: bool = False) -> int:
    """Show what a run does now, and who waits for whom.

    Parameters
    ----------
    run
        The run folder, or its config file.
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    pid = folder.launcher_pid()
    finish = folder.finish()
    now, why = _fetch_status(folder) if pid is not None else (None, "")
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
        print(f"running (pid {pid}), but its dataflow does not answer: {why}")
    elif finish is not None:
        print(f"finished: {finish.steps} steps, {finish.trajectories:,} trajectories")
    else:
        print(f"not running; `penstock run {run}` resumes it")
    return 0


def _fetch_status(folder: RunFolder) -> tuple[Status | None, str]:
    from penstock.dataflow.client.dataflow import StatusClient
    from penstock.errors import WireError
    from penstock.wire.auth import Role

    reader = StatusClient(
        folder.endpoints().dataflow,
        folder.token(folder.read_config().name, Role.READER, ttl_s=60.0),
    )
    try:
        return reader.status(), ""
    except WireError as error:
        return None, str(error)
    finally:
        reader.close()


def _draw(folder: RunFolder, now: Status, *, hint: str) -> None:
    from rich.console import Console

    from penstock.cli.live_panel import draw
    from penstock.runs.monitor import RunView

    curves = {
        str(p.policy): [p.reward_mean] if p.reward_mean is not None else [] for p in now.policies
    }
    view = RunView(
        name=now.run,
        elapsed_s=now.uptime_s,
        status=now,
        unreachable_s=0.0,
        curves=curves,
        eta_s=None,
        note="",
    )
    console = Console()
    console.print(draw(view, console.width, hint))
    console.print(f"logs: {folder.logs / 'latest'}", highlight=False, soft_wrap=True)
