# SPDX-License-Identifier: Apache-2.0
"""`bubbles` with real processes: the demo with a node beside its trainer, then on one resource with
the tags `rollout` and `train`, which they take in turns. Idle is what the run's own time account
says, between the fifth step and the last; predicted from its own rates."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import log_line, result, scratch
from penstock.dataflow.report.figures import NodeActivity, TrainerActivity
from penstock.errors import PenstockError
from penstock.fleet.idle_forecast import Load, Pipeline, Tagging, predict_idle
from penstock.fleet.run_folder import RunFolder
from penstock.runs.control import read_report

WARM_UP = 5
LIMIT_S = 900.0
SHARED = "hosts={here: {memory_gb: 4, tags: [rollout, train]}}"
TRAINS = (TrainerActivity.TRAINING, TrainerActivity.PUBLISHING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    wall_s: float
    rollout_s: float
    train_s: float
    steps: int
    switches_s: list[float]
    """From each decision to change over until the node had done it."""
    resources: int

    @property
    def idle(self) -> float:
        return 1 - (self.rollout_s + self.train_s) / (self.resources * self.wall_s)

    @property
    def predicted(self) -> float:
        is_shared = self.resources == 1
        load = Load(
            rollout_s=self.rollout_s / self.steps,
            train_s=self.train_s / self.steps,
            switch_s=statistics.fmean(self.switches_s) if self.switches_s else 0.0,
        )
        tagging = Tagging(both=1) if is_shared else Tagging(rollout=1, train=1)
        visits = max(1, len(self.switches_s) // 2)
        return predict_idle(
            Pipeline.MULTIPLEXED if is_shared else Pipeline.OFF_POLICY,
            load,
            tagging,
            batches_per_visit=max(1, round(self.steps / visits)),
        )


def accounts(folder: RunFolder, min_steps: int, run: subprocess.Popen[bytes]) -> Counter[str]:
    """Seconds of the node and the trainer by activity, once so many steps are done."""
    give_up_at = time.monotonic() + LIMIT_S
    while run.poll() is None and time.monotonic() < give_up_at:
        steps = folder.metrics.read_bytes().count(b"\n") if folder.metrics.exists() else 0
        if steps >= min_steps:
            try:
                found = read_report(folder)
            except PenstockError:  # it is busy
                continue
            seconds = Counter(dict(found.nodes[0].time.seconds))
            seconds.update(
                {f"trainer {k}": v for k, v in found.policies[0].trainer_time.seconds.items()}
            )
            return seconds + Counter({"steps": steps})
        time.sleep(0.1)
    raise RuntimeError(f"the run did not reach step {min_steps}; see {folder.path}.out")


def measure(path: Path, *words: str, steps: int) -> Measured:
    folder, own = RunFolder(path), ("models.policy.replicas=1", f"training.steps={steps + 50}")
    command = [sys.executable, "-m", "penstock.cli.main", "demo", "--dir", str(path), "--headless"]
    with path.with_suffix(".out").open("wb") as out:
        run = subprocess.Popen([*command, *own, *words], stdout=out, stderr=out)
    try:
        before, began_at = accounts(folder, WARM_UP, run), time.time()
        after, ended_at = accounts(folder, steps, run), time.time()
    finally:
        run.terminate()
        run.wait(120)
    spent = after - before
    events = folder.path / "events.jsonl"
    lines = [json.loads(line) for line in events.open()] if events.exists() else []
    return Measured(
        wall_s=ended_at - began_at,
        rollout_s=spent[NodeActivity.ROLLING_OUT],
        train_s=sum(spent[f"trainer {one}"] for one in TRAINS),
        steps=int(spent["steps"]),
        switches_s=[
            one["seconds"]
            for one in lines
            if began_at <= one["time"] <= ended_at and one["trigger"] != "new_weights"
        ],
        resources=1 if SHARED in words else 2,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the steps")
    parser.add_argument("--folder", type=Path, help="where the runs write; the temp folder")
    options = parser.parse_args()
    steps = 25 if options.quick else 80
    with scratch(options.folder) as folder:
        dedicated = measure(folder / "dedicated", steps=steps)
        log_line(f"dedicated: {dedicated}")
        shared = measure(
            folder / "shared",
            SHARED,
            "dataflow.sharing.batches=2",
            "training.max_staleness=2",
            steps=steps,
        )
        log_line(f"shared: {shared}")
    result(
        idle_dedicated=dedicated.idle,
        idle_multiplexed=shared.idle,
        predicted_dedicated=dedicated.predicted,
        predicted_multiplexed=shared.predicted,
        switches=len(shared.switches_s),
        switch_s=statistics.fmean(shared.switches_s),
    )


if __name__ == "__main__":
    main()
