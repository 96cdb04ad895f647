# SPDX-License-Identifier: Apache-2.0
"""Each built-in tracker, with the real library: what was sent is read back with the library's own
reader, and what is sent again after a restart is there once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.config.trackers import TRACKERS_PACKAGE
from penstock.observe.tracking import OPENTELEMETRY
from penstock.plugins import builtin_names
from penstock.rollout.environments.environments import environment_python

SCRIPT = Path(__file__).parent / "tracker_scripts" / "send_and_read.py"
SOURCES = Path(penstock.__file__).parents[1]
CURVE = [[1, 1 / 8], [2, 2 / 8], [3, 3 / 8]]
IN_AN_ENVIRONMENT_OF_THEIR_OWN = ("mlflow", "wandb")
EVERY = [
    pytest.param(name, marks=pytest.mark.envs if name in IN_AN_ENVIRONMENT_OF_THEIR_OWN else ())
    for name in builtin_names(TRACKERS_PACKAGE)
    if name != OPENTELEMETRY  # gets rollouts, not points: tests/unit/runs/test_rollouts.py
]


@pytest.mark.parametrize("name", EVERY)
def test_points_are_read_back_once(name: str, tmp_path: Path) -> None:
    call(name, tmp_path, "1", "2")
    call(name, tmp_path, "2", "3")
    found = json.loads(call(name, tmp_path).splitlines()[-1])
    if name == "wandb":  # the second start begins a new offline folder, and knows no other
        assert found.pop(2) == CURVE[1]
    assert found == CURVE


def call(name: str, folder: Path, *points: str) -> str:
    is_foreign = name in IN_AN_ENVIRONMENT_OF_THEIR_OWN
    python = environment_python("trackers") if is_foreign else sys.executable
    done = subprocess.run(
        [python, SCRIPT, name, folder, *points],
        env={
            **os.environ,
            "PYTHONPATH": str(SOURCES),
            "TRACKIO_DIR": str(folder / "trackio"),
            "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
            "WANDB_MODE": "offline",
        },
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
