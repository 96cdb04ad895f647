# SPDX-License-Identifier: Apache-2.0
"""`penstock stop`: stop a run gracefully."""

from __future__ import annotations

from pathlib import Path


def stop(run: Path, /, *, timeout_s: float = 60.0, json: bool = False) -> int:
    """Stop a run gracefully: nodes return their work and trainers finish their step.

    Args:
        run: Run folder, or its config file.
        timeout_s: Seconds to wait for the run to stop.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.runs.control import stop_run
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    was_running = stop_run(folder, timeout_s=timeout_s)
    if was_running:
        print_note(f"stopped; `penstock run {run}` resumes it")
    else:
        print_note(f"{folder.path} is not running")
    if json:
        print_json({"run": str(folder.path), "stopped": was_running})
    return 0
