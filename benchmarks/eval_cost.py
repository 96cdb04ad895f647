# SPDX-License-Identifier: Apache-2.0
"""What evaluations cost a run: CPU time beside training against training and evaluations apart, and
how much longer the trainer waits for data when another node evaluates.

Real runs of the demo, with all their processes; an evaluation answers five times as many prompts
as a step. The CPU time of an evaluation alone is the difference between two runs of one step, with
evaluations and without. Starting the processes costs CPU time too, the same in every run."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import log_line, result, scratch

EVERY = 5
SLOWER = 5
"""An evaluation answers this many times the prompts of a step."""
SAMPLES = 4
GROUP_SIZE = 16
WARM_UP = 2
"""Steps whose wait is not counted: nodes are starting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    cpu_s: float
    """Of all processes of the run."""
    wait_s: float
    """The trainer's wait for batches."""
    num_evaluations: int


def overrides(steps: int, groups: int, *, evaluates: bool, nodes: int) -> list[str]:
    words = [
        f"training.steps={steps}",
        f"training.groups_per_batch={groups}",
        "training.lr_scheduler_type=constant",
        f"algorithm.num_generations={GROUP_SIZE}",
    ]
    if evaluates:
        limit = SLOWER * groups * GROUP_SIZE // SAMPLES
        suite = f"{{name: held_out, task: penstock.tasks.reverse, limit: {limit}}}"
        words.append(
            f"eval={{every: {EVERY}, samples: {SAMPLES}, nodes: {nodes}, suites: [{suite}]}}"
        )
    return words


def measure(folder: Path, words: Sequence[str]) -> Measured:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "--dir", str(folder), *words]
    done = subprocess.run([*command, "--headless"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the run failed:\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    waits = [line["seconds/wait"] for line in lines if "seconds/wait" in line]
    return Measured(
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        wait_s=sum(waits[WARM_UP:]),
        num_evaluations=len([*(folder / "evaluations").glob("*@*.json")]),
    )


def measure_round(folder: Path, steps: int, groups: int) -> dict[str, float]:
    """One run of each kind."""
    found: dict[str, Measured] = {}
    for name, num_steps, evaluates, nodes in (
        ("training", steps, False, 0),
        ("both", steps, True, 0),
        ("one_step", 1, False, 0),
        ("one_step_evaluated", 1, True, 0),
        ("own_node", steps, True, 1),
    ):
        words = overrides(num_steps, groups, evaluates=evaluates, nodes=nodes)
        found[name] = measure(folder / name, words)
        log_line(f"{name}: {found[name]}")
    alone = found["one_step_evaluated"].cpu_s - found["one_step"].cpu_s
    per_evaluation_s = alone / found["one_step_evaluated"].num_evaluations
    both, training = found["both"], found["training"]
    expected_s = training.cpu_s + both.num_evaluations * per_evaluation_s
    return {
        "cpu_ratio": both.cpu_s / expected_s,
        "blocked_ratio": found["own_node"].wait_s / training.wait_s,
        "evaluation_cpu_s": per_evaluation_s,
        "evaluations": both.num_evaluations,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of shorter runs")
    parser.add_argument("--dir", type=Path, help="where to write; default: the system's folder")
    args = parser.parse_args()
    num_rounds, steps, groups = (1, 20, 32) if args.quick else (3, 60, 64)
    rounds: list[dict[str, float]] = []
    with scratch(args.dir) as folder:
        for index in range(num_rounds):
            rounds.append(measure_round(folder / f"round-{index}", steps, groups))
    result(**{name: statistics.median(one[name] for one in rounds) for name in rounds[0]})


if __name__ == "__main__":
    main()
