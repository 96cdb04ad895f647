# SPDX-License-Identifier: Apache-2.0
"""The command that trains with TRL imports TRL, not the module of ours with its name."""

import subprocess
import sys
from pathlib import Path

from benchmarks import trl

from penstock.config import demo_config


def test_its_interpreter_looks_for_the_library(tmp_path: Path) -> None:
    run = trl.make_run(tmp_path, demo_config(0, ["training.steps=1"]), tmp_path)
    command = trl.command(Path(sys.executable), [run])  # an interpreter without TRL
    done = subprocess.run(command, env=trl.variables(), capture_output=True, text=True)
    assert "No module named 'trl'" in done.stderr
