# SPDX-License-Identifier: Apache-2.0
"""The learning curves of runs: `curve.py FILE.svg RUN [RUN …]` draws the share of answers that are
wholly right over the versions that sampled them, a line for each run.

Counted over all answers that the ledger holds. Needs the root of this repository on PYTHONPATH."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.plot import Curve, curves
from recipes.smollm2_arithmetic.curve import points_of, rewards_of


def curve_of(run: Path) -> Curve:
    right = [(version, float(reward == 1)) for version, reward in rewards_of(run)]
    return Curve(label=f"seed {run.name.rsplit('-')[-1]}", points=points_of(right, 1))


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("curve.py FILE.svg RUN …: run folders, such as outputs/smollm2-counting-0")
    text = curves(
        "SmolLM2-135M learns to count on",
        [curve_of(Path(word)) for word in sys.argv[2:]],
        unit="share of right answers, sampled at temperature 1, 95 % interval",
        x_label="version that sampled",
    )
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
