# SPDX-License-Identifier: Apache-2.0
"""`penstock drain`: take one rollout node out of a running run."""

from __future__ import annotations

from pathlib import Path


def drain(
    run: Path, node: str, /, *, why: str = "", timeout_s: float = 60.0, json: bool = False
) -> int:
    """Tell a rollout node to return its work and leave; no row is lost.

    The launcher of the run does not start it again, nor another node in its place, unless the pool
    was scaled. A node that something else restarts, such as Kubernetes, joins again: end it there
    too.

    Args:
        run: Run folder, or its config file.
        node: Name of the node, as `penstock status` shows it.
        why: Reason, for the log of operators' actions.
        timeout_s: How long to wait until it has left, in seconds.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.observe.admin_log import local_user
    from penstock.runs.control import drain_node
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    has_left = drain_node(folder, node, who=local_user(), why=why, timeout_s=timeout_s)
    if has_left:
        print_note(f"{node} has returned its work and left")
    else:
        print_note(
            f"{node} was ordered to leave, but is still there after {timeout_s:g} s; `penstock "
            f"status {run}` shows it. If it hangs, end its process: its work goes to others"
        )
    if json:
        print_json({"run": str(folder.path), "node": node, "has_left": has_left})
    return 0 if has_left else 1
