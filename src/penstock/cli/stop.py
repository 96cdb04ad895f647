# SPDX-License-Identifier: Apache-2.0
"""`penstock stop`: ask the launcher of a run to end it in order, and wait until it has."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from penstock.errors import LaunchError


def stop(run: Path, /, *, timeout_s: float = 60.0, json: bool = False) -> int:
    """End a run in order: nodes hand back their work, the trainer finishes its step.

    Parameters
    ----------
    run
        The run folder, or its config file.
    timeout_s
        Give up waiting after so many seconds.
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.output import note, print_json
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    pid = folder.launcher_pid()
    if pid is None:
        note(f"{folder.path} is not running")
    else:
        os.kill(pid, signal.SIGTERM)
        give_up_at = time.monotonic() + timeout_s
        while folder.launcher_pid() == pid:
            if time.monotonic() > give_up_at:
                raise LaunchError(
                    f"the launcher of {folder.path} (pid {pid}) still runs after {timeout_s:g} s; "
                    f"`kill -9 {pid}` ends it and all its services at once, and loses nothing"
                )
            time.sleep(0.1)
        note(f"stopped; `penstock run {run}` resumes")
    if json:
        print_json({"run": str(folder.path), "stopped": pid is not None})
    return 0
