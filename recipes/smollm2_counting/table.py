# SPDX-License-Identifier: Apache-2.0
"""The figures of several seeds: `table.py RUN [RUN …]` prints a Markdown table, a row for each run
folder that `repeat.sh` made. Computes nothing: the figures are those of `penstock compare`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import penstock

HEADERS = ("run", "before", "after", "difference, paired", "p", "gained, lost", "tokens an answer")


def row_of(run: Path) -> list[str]:
    [suite] = penstock.compare(f"{run}@0", str(run)).suites
    return [
        run.name,
        _share(suite.a.avg, suite.a.interval),
        _share(suite.b.avg, suite.b.interval),
        _share(suite.difference, suite.interval, sign="+"),
        f"{suite.p_value:.1g}",
        f"{len(suite.gained)}, {len(suite.lost)}",
        f"{suite.a.mean_tokens:.1f}, {suite.b.mean_tokens:.1f}",
    ]


def _share(value: float, interval: tuple[float, float], *, sign: str = "") -> str:
    low, high = interval
    return f"{value:{sign}.3f} ({low:{sign}.3f} to {high:{sign}.3f})"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("table.py RUN …: run folders, such as outputs/smollm2-counting-0")
    rows = [row_of(Path(word)) for word in sys.argv[1:]]
    print("\n".join(map(_line, [HEADERS, ["---"] * len(HEADERS), *rows])))


if __name__ == "__main__":
    main()
