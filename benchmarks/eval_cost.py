# SPDX-License-Identifier: Apache-2.0
"""What evaluations cost a run: CPU time beside training against training and evaluations apart, and
how much longer the trainer waits for data when another node evaluates.

Real runs of the demo, with all their processes; an evaluation answers five times as many prompts
as a step. Each round has one run of every kind, and the ratios are of medians over the rounds, so
that a busy minute of the machine hits all kinds alike.

A node of its own has a processor of its own where people run one. So the runs whose waits are
compared have the trainer and its nodes on one core and everything else on another, where a node
for evaluations gets only the time that the services leave.

The CPU time of the evaluations alone is the difference between two runs of one step, with
evaluations and without: as many answers as in the long run, so that the noise of the difference is
not multiplied. Starting the processes costs CPU time too. It is the same in all runs without a
node of its own for evaluations; the run with that node counts for the wait only."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import log_line, result, scratch
from penstock.fleet.run_folder import RunFolder

EVERY = 5
SLOWER = 5
"""An evaluation answers this many times the prompts of a step."""
SAMPLES = 4
GROUP_SIZE = 16
ONE_STEP_EVALUATIONS = 2
"""Evaluations of a run of one step: before and after it."""
WARM_UP = 2
"""Steps whose wait is not counted: nodes are starting."""
PLACE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A run that is measured."""

    steps: int
    groups: int
    """Of a batch."""
    num_answers: int = 0
    """Of each evaluation; 0: no evaluations."""
    own_nodes: int = 0
    """Nodes that only evaluate."""
    placed: bool = False
    """Training has a core, and the services and the node for evaluations another."""

    def overrides(self) -> list[str]:
        words = [
            f"training.steps={self.steps}",
            f"training.groups_per_batch={self.groups}",
            "training.lr_scheduler_type=constant",
            f"algorithm.num_generations={GROUP_SIZE}",
        ]
        if self.num_answers:
            limit = self.num_answers // SAMPLES
            suite = f"{{name: held_out, task: penstock.tasks.reverse, limit: {limit}}}"
            settings = f"every: {EVERY}, samples: {SAMPLES}, nodes: {self.own_nodes}"
            words.append(f"eval={{{settings}, suites: [{suite}]}}")
        return words


def kinds(steps: int, groups: int) -> dict[str, Kind]:
    num_answers = SLOWER * groups * GROUP_SIZE
    num_evaluations = steps // EVERY + 1  # also before the first step
    alone = num_answers * num_evaluations // ONE_STEP_EVALUATIONS
    return {
        "training": Kind(steps=steps, groups=groups),
        "placed": Kind(steps=steps, groups=groups, placed=True),
        "own_node": Kind(
            steps=steps, groups=groups, num_answers=num_answers, own_nodes=1, placed=True
        ),
        "both": Kind(steps=steps, groups=groups, num_answers=num_answers),
        "one_step": Kind(steps=1, groups=groups),
        "one_step_evaluated": Kind(steps=1, groups=groups, num_answers=alone),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    cpu_s: float
    """Of all processes of the run."""
    wait_s: float
    """The trainer's wait for batches."""


def place(folder: Path) -> None:
    """Move what runs to its core; called again and again, since services may start late."""
    record = RunFolder(folder).launcher()
    for name, pid in record.services.items() if record else ():
        trains = name.startswith(("node-", "trainer-"))
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            root = psutil.Process(pid)
            for process in (root, *root.children(recursive=True)):
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, {0 if trains else 1})
                if name.startswith("eval-node-"):
                    process.nice(min(19, psutil.Process().nice() + 10))


def measure(folder: Path, kind: Kind) -> Measured:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "demo",
        "--headless",
        "--dir",
        str(folder),
    ]
    output = folder.with_suffix(".log")
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("w") as log:
        run = subprocess.Popen([*command, *kind.overrides()], stdout=log, stderr=log)
        while run.poll() is None:
            if kind.placed:
                place(folder)
            time.sleep(PLACE_EVERY_S)
    if run.returncode:
        raise RuntimeError(f"the run failed:\n{output.read_text()}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    waits = [line["seconds/wait"] for line in lines if "seconds/wait" in line]
    return Measured(
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        wait_s=sum(waits[WARM_UP:]),
    )


def summarise(rounds: Sequence[Mapping[str, Measured]]) -> dict[str, float]:
    def cpu_s(name: str) -> float:
        return statistics.median(one[name].cpu_s for one in rounds)

    def wait_s(name: str) -> float:
        return statistics.median(one[name].wait_s for one in rounds)

    alone_s = cpu_s("one_step_evaluated") - cpu_s("one_step")
    return {
        "cpu_ratio": cpu_s("both") / (cpu_s("training") + alone_s),
        "blocked_ratio": wait_s("own_node") / wait_s("placed"),
        "training_cpu_s": cpu_s("training"),
        "both_cpu_s": cpu_s("both"),
        "evaluations_cpu_s": alone_s,
        "start_cpu_s": cpu_s("one_step"),
        "wait_s": wait_s("placed"),
        "own_node_wait_s": wait_s("own_node"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="shorter runs")
    parser.add_argument("--rounds", type=int, help="how many; default: 1 quick, 5 full")
    parser.add_argument("--dir", type=Path, help="where to write; default: the system's folder")
    args = parser.parse_args()
    num_rounds, steps, groups = (1, 20, 32) if args.quick else (5, 60, 64)
    rounds: list[dict[str, Measured]] = []
    with scratch(args.dir) as folder:
        for index in range(args.rounds or num_rounds):
            found: dict[str, Measured] = {}
            for name, kind in kinds(steps, groups).items():
                found[name] = measure(folder / f"round-{index}" / name, kind)
                log_line(f"round {index + 1}, {name}: {found[name]}")
            rounds.append(found)
    result(**summarise(rounds))


if __name__ == "__main__":
    main()
