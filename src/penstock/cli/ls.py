# SPDX-License-Identifier: Apache-2.0
"""`penstock ls`: the runs under a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from penstock.runs.listing import ListedRun

HEADERS = ("run", "state", "step", "reward", "last active", "size")


def ls(dir: Path = Path("outputs"), /, *, json: bool = False) -> int:
    """List the runs under a folder: state, step, reward, age and size, newest first.

    Args:
        dir: Folder of runs, as output_dir in the config.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.runs.listing import list_runs

    found = list_runs(dir)
    if json:
        print_json({"dir": str(dir), "runs": found})
    elif not found:
        print_text(f"no runs in {dir}; `penstock run CONFIG` creates them")
    else:
        print_text("\n".join(lines(found)))
    return 0


def lines(runs: Sequence[ListedRun]) -> Iterator[str]:
    from penstock.cli.output import format_age, format_bytes, table

    rows = [
        (
            run.name,
            run.state,
            "–" if run.step is None else f"{run.step}/{run.steps}",
            "–" if run.reward is None else f"{run.reward:.3f}",
            f"{format_age(run.age_s)} ago",
            format_bytes(run.size_bytes),
        )
        for run in runs
    ]
    yield from table(HEADERS, rows, num_left_aligned=2)
