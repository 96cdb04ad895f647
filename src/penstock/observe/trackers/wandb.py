# SPDX-License-Identifier: Apache-2.0
"""Weights & Biases, online or offline as WANDB_MODE says; its files are in RUN/wandb.

W&B wants steps that only grow, and an evaluation ends after later steps. So W&B counts points, and
draws every metric over our `step`. Its own process stores and uploads what it was given, and tries
again for as long as it lives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from penstock.observe.tracking import PROJECT, Point, TrackedRun
from penstock.plugins import load_module


class Wandb:
    def __init__(self, run: TrackedRun) -> None:
        wandb: Any = load_module("wandb")
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            id=run.id,
            name=run.name,
            group=run.run,
            config=dict(run.config),
            dir=str(run.folder),
            resume="allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def send(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.values, "step": point.step}, step=point.index)

    def close(self) -> None:
        self._run.finish()


TRACKER = Wandb
