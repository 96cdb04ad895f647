# SPDX-License-Identifier: Apache-2.0
"""Run folders with a made-up metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.config import demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.observe.metrics import MetricsFile


def run_with_metrics(
    path: Path, batches: Iterable[tuple[int, int, float]], *, policy: str = "policy"
) -> RunFolder:
    """A run whose trainer committed these batches: sequence number, step, mean reward."""
    folder = RunFolder(path)
    folder.write_config(demo_config(0))
    metrics = MetricsFile(folder.metrics)
    step_before = 0
    for seq, number, reward in batches:
        metrics.append(
            {
                "policy": policy,
                "number": number,
                "seq": seq,
                "incarnation": 1,
                "skipped": "" if number != step_before else "zero_advantage",
                "reward/mean": reward,
                "loss": -reward,
            }
        )
        step_before = number
    metrics.close()
    return folder
