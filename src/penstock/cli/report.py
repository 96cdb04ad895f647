# SPDX-License-Identifier: Apache-2.0
"""`penstock report`: whether rollout and training are balanced."""

from __future__ import annotations

from pathlib import Path


def report(run: Path, /, *, json: bool = False) -> int:
    """Show whether rollout and training are balanced, and where time goes.

    Args:
        run: Run folder, or its config file; the run must be running.
        json: Print the report as one JSON object on the last line. The documentation has its
            schema.
    """
    from penstock.cli.output import print_json
    from penstock.errors import WireError
    from penstock.runs.control import read_report
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    pid = folder.launcher_pid()
    if pid is None:
        raise WireError(f"{folder.path} is not running; `penstock run {run}` resumes it")
    try:
        answer = read_report(folder)
    except WireError as error:
        raise WireError(
            f"the run is running (pid {pid}), but its dataflow returned no report: {error}"
        ) from None
    if json:
        print_json(answer)
    else:
        from penstock.dataflow.report.text import render

        print(render(answer))
    return 0
