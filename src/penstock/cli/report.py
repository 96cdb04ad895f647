# SPDX-License-Identifier: Apache-2.0
"""`penstock report`: whether rollout and training are balanced."""

from __future__ import annotations

from pathlib import Path


def report(run: Path, /, *, json: bool = False) -> int:
    """Show whether rollout and training are balanced, and where time goes.

    A run that has ended is answered from the last report that it stored.

    Args:
        run: Run folder, or its config file.
        json: Print the report as one JSON object on the last line. The documentation has its
            schema.
    """
    from penstock.cli.output import format_moment, print_json, print_note, print_text
    from penstock.errors import WireError
    from penstock.runs.control import read_report, read_stored_report
    from penstock.runs.state import RunState, read_summary
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    found = read_summary(folder)
    if found.status is not None:
        answer = read_report(folder)
    elif found.state is RunState.RUNNING:
        raise WireError(
            f"the run is running (pid {found.pid}), but its dataflow returned no report: "
            f"{found.why}"
        )
    else:
        answer = read_stored_report(folder)
        print_note(f"{found.state}; its last report is of {format_moment(answer.at)}")
    if json:
        print_json(answer)
    else:
        from penstock.dataflow.report.text import render

        print_text(render(answer))
    return 0
