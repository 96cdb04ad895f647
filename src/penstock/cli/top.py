# SPDX-License-Identifier: Apache-2.0
"""`penstock top`: a running run on one screen."""

from __future__ import annotations

from pathlib import Path


def top(run: Path, /, *, json: bool = False) -> int:
    """Show flow, curves and fleet of a running run on the whole screen, until it ends or Ctrl-C,
    which leaves the run alone.

    Args:
        run: Run folder, or its config file.
        json: Print one JSON object as the last line, once: what `penstock status --json` prints.
    """
    import sys

    from penstock.cli.output import print_note
    from penstock.cli.status import status
    from penstock.cli.top_screen import TopScreen
    from penstock.runs.state import RunState, read_summary
    from penstock.runs.target import find_run_folder
    from penstock.runs.watch import watch_run

    folder = find_run_folder(run)
    found = read_summary(folder)
    if json or found.state is not RunState.RUNNING or not sys.stdout.isatty():
        return status(run, json=json)
    screen = TopScreen()
    try:
        watch_run(folder, found.name, screen)
    except KeyboardInterrupt:
        screen.close()
        print_note(f"the run goes on; `penstock stop {run}` stops it")
        return 0
    screen.close()
    return status(run)
