# SPDX-License-Identifier: Apache-2.0
"""The curves of a run: `python curve.py RUN FILE.csv` writes, for each step, the mean reward of its
rows and the share of the planner's replies that were malformed.

The workflow `planner` gives a malformed reply the reward 0 and no other reply a reward of its own.
"""

import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from penstock import open_run


def write_curves(folder: Path, file: Path) -> None:
    rewards, malformed = defaultdict[int, list[float]](list), defaultdict[int, list[bool]](list)
    with open_run(folder) as run:
        for row in run.trajectories(steps=(1, None)):
            if row.payload is None or row.reward is None:
                sys.exit(f"{row.row_id} is stored without its turns; run with dataflow.keep=all")
            [step] = row.steps
            rewards[step].append(row.reward)
            replies = [turn for turn in row.turns if turn.role == "planner"]
            malformed[step] += [reply.reward is not None for reply in replies]
    with file.open("w", newline="") as out:
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(["step", "reward", "malformed_share"])
        for step in sorted(rewards):
            figures = fmean(rewards[step]), fmean(malformed[step])
            lines.writerow([step, *(f"{figure:.4f}" for figure in figures)])


if __name__ == "__main__":
    write_curves(Path(sys.argv[1]), Path(sys.argv[2]))
