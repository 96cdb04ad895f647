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
    from penstock.errors import LaunchError
    from penstock.runs.control import stop_run
    from penstock.runs.state import RunState, read_summary
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    was_running = stop_run(folder, timeout_s=timeout_s)
    found = read_summary(folder)
    if not was_running and found.state is RunState.RUNNING:
        names = ", ".join(node.node_id for node in found.status.nodes) if found.status else ""
        nodes = f", with nodes {names}" if names else ""
        raise LaunchError(
            f"{folder.path} has no launcher: its services were started one by one, and this "
            "command cannot signal them. Its dataflow service answers at "
            f"{folder.endpoints().dataflow}{nodes}. Send SIGTERM to each process "
            "yourself: nodes and trainers first, the dataflow service last"
        )
    if was_running:
        step = f"{found.progress.step}/{found.progress.steps}"
        print_note(f"stopped at step {step}; `penstock run {run}` resumes it")
    else:
        print_note(f"{folder.path} is not running ({found.state}); there is nothing to stop")
    if json:
        summary = {"stopped": was_running, "state": found.state, "step": found.progress.step}
        print_json({"run": str(folder.path), **summary})
    return 0
