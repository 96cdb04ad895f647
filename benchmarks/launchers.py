# SPDX-License-Identifier: Apache-2.0
"""What Ray costs a run: the demo by `launcher: local` and by `launcher: ray` on a new cluster, in
turns. Wall time from the command to its end, to the first step, and per step between; CPU time of
the whole tree of processes, Ray's own included, sampled while it runs."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.harness import log_line, result, scratch

LAUNCHERS = ("local", "ray")
SAMPLE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    total_s: float
    first_step_s: float
    step_s: float
    """Between the first step and the last."""
    cpu_s: float
    rss_mb: float
    """Largest sum over the processes; shared pages count for each."""


def measure(folder: Path, launcher: str, steps: int) -> Measured:
    words = (f"training.steps={steps}", "training.lr_scheduler_type=constant")
    command = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "demo",
        "--dir",
        str(folder),
        "--headless",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    began_at, stepped_at = time.monotonic(), list[float]()
    cpu_s, rss_mb = dict[tuple[int, float], float](), 0.0
    with folder.with_suffix(".out").open("wb") as out:
        run = subprocess.Popen(
            [*command, *words, f"launcher={launcher}"], env=env, stdout=out, stderr=out
        )
    while run.poll() is None:
        rss_mb = max(rss_mb, _sample(psutil.Process(run.pid), cpu_s))
        num_steps = _num_lines(folder / "metrics.jsonl")
        stepped_at += [time.monotonic()] * (num_steps - len(stepped_at))
        time.sleep(SAMPLE_S)
    if run.returncode:
        raise RuntimeError(f"the run failed:\n{folder.with_suffix('.out').read_text()}")
    return Measured(
        total_s=time.monotonic() - began_at,
        first_step_s=stepped_at[0] - began_at,
        step_s=(stepped_at[-1] - stepped_at[0]) / (len(stepped_at) - 1),
        cpu_s=sum(cpu_s.values()),
        rss_mb=rss_mb,
    )


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _sample(root: psutil.Process, cpu_s: dict[tuple[int, float], float]) -> float:
    """Note the CPU time of every process so far; returns their memory in MB."""
    total = 0
    try:
        every = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in every:
        try:
            times = process.cpu_times()
            cpu_s[process.pid, process.create_time()] = times.user + times.system
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


def summarise(rounds: Sequence[Mapping[str, Measured]]) -> dict[str, float]:
    def median(launcher: str, name: str) -> float:
        return statistics.median(getattr(one[launcher], name) for one in rounds)

    names = ("total_s", "first_step_s", "step_s", "cpu_s", "rss_mb")
    figures = {f"{name}_{one}": median(one, name) for name in names for one in LAUNCHERS}
    ratios = {
        f"{name}_ratio": median("ray", f"{name}_s") / median("local", f"{name}_s")
        for name in ("total", "step", "cpu")
    }
    return {**ratios, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round of 20 steps")
    parser.add_argument("--dir", type=Path, help="where to write; default: the system's folder")
    args = parser.parse_args()
    num_rounds, steps = (1, 20) if args.quick else (3, 130)
    rounds: list[dict[str, Measured]] = []
    with scratch(args.dir) as folder:
        for index in range(num_rounds):
            found: dict[str, Measured] = {}
            for launcher in LAUNCHERS:
                found[launcher] = measure(folder / f"{launcher}-{index}", launcher, steps)
                log_line(f"round {index + 1}, {launcher}: {found[launcher]}")
            rounds.append(found)
    result(**summarise(rounds))


if __name__ == "__main__":
    main()
