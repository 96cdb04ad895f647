# SPDX-License-Identifier: Apache-2.0
"""The learning curve of a run: `curve.py RUN FILE.svg` draws the share of right answers over the
versions that sampled them.

Counted over all answers that the ledger holds, also those of groups that a rule kept out of
training. Needs the root of this repository on PYTHONPATH, for its charts."""

from __future__ import annotations

import json
import math
import sqlite3
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks.plot import Curve, Point, curves

VERSIONS_PER_POINT = 5
CONFIDENT = 1.96


def rewards_of(run: Path) -> list[tuple[int, float]]:
    """Of each answer: the version that sampled its first token, and its reward."""
    ledger = sqlite3.connect(f"file:{run / 'ledger' / 'ledger.db'}?mode=ro", uri=True)
    rows = ledger.execute("SELECT versions, reward FROM rows WHERE reward IS NOT NULL").fetchall()
    ledger.close()
    return [(_first_version(versions), reward) for versions, reward in rows]


def _first_version(versions: str) -> int:
    [numbers] = json.loads(versions).values()
    return min(number for _, number in numbers)


def points_of(
    rewards: Iterable[tuple[int, float]], versions_per_point: int = VERSIONS_PER_POINT
) -> list[Point]:
    """Some versions to a point, at the first of them."""
    parts: defaultdict[int, list[float]] = defaultdict(list)
    for number, reward in rewards:
        parts[number // versions_per_point * versions_per_point].append(reward)
    return [_point(number, values) for number, values in sorted(parts.items())]


def _point(number: int, values: list[float]) -> Point:
    share = sum(values) / len(values)
    half_width = CONFIDENT * math.sqrt(share * (1 - share) / len(values))
    return Point(x=number, y=share, half_width=half_width)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("curve.py RUN FILE.svg: a run folder, such as outputs/smollm2-arithmetic")
    run, file = Path(sys.argv[1]), Path(sys.argv[2])
    text = curves(
        "SmolLM2-135M learns sums and differences up to 40",
        [Curve(label="sampled", points=points_of(rewards_of(run)))],
        unit=f"share of right answers, sampled at temperature 1, {VERSIONS_PER_POINT} versions to "
        "a point, 95 % interval",
        x_label="version that sampled",
    )
    file.write_text(text)


if __name__ == "__main__":
    main()
