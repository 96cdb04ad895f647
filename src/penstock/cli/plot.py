# SPDX-License-Identifier: Apache-2.0
"""`penstock plot`: curves of one or more runs."""

from __future__ import annotations

import sys
from pathlib import Path

MAX_WIDTH = 120
PANEL_LINES = 22


def plot(
    *runs: Path,
    metric: tuple[str, ...] = (),
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Draw the reward, or any metric, of one or more runs by step: in the terminal, or into a file.

    Args:
        runs: Run folders, or their config files; several are compared in one picture.
        metric: Metric to draw, such as loss or seconds/train; repeat it for several. The default is
            the mean reward.
        out: File to write: .svg, .png or .csv.
        json: Print the curves as one JSON object on the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.errors import ConfigError
    from penstock.runs.plots import make_plot, plot_text, write_plot
    from penstock.runs.target import find_run_folder

    if not runs:
        raise ConfigError("give at least one run: penstock plot outputs/RUN …")
    found = make_plot([find_run_folder(run) for run in runs], metric)
    for name, lacking in found.without.items():
        print_note(f"no metric {name} in {', '.join(lacking)}")
    if out is not None:
        write_plot(found, out)
        print_note(f"wrote {out}")
    if json:
        curves = [curve for curves in found.panels.values() for curve in curves]
        print_json({"out": None if out is None else str(out), "curves": curves})
    elif out is None:
        width, height = _panel_size(len(found.panels))
        print(plot_text(found, width=width, height=height, colour=sys.stdout.isatty()))
    return 0


def _panel_size(num_panels: int) -> tuple[int, int]:
    """A panel that leaves room for the prompt; several share the height down to a readable one."""
    import shutil

    columns, rows = shutil.get_terminal_size()
    height = min(PANEL_LINES, max(12, (rows - 2) // num_panels))
    return min(columns, MAX_WIDTH), height
