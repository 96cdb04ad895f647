# SPDX-License-Identifier: Apache-2.0
"""`penstock.runs` works without the command line: nothing of `penstock.cli` is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.unit.runs.test_fork import NUM_STEPS, parent

from penstock.fleet.run_folder import RunFolder

__all__ = ["parent"]

NO_CLI = "assert not [name for name in sys.modules if name.startswith('penstock.cli')]\n"
LAUNCH = """
import sys
from pathlib import Path
import penstock.runs.launch as launching
from penstock.config import demo_config
from penstock.errors import LaunchError
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.services import ServiceKind, ServiceSpec

def services(config, folder, devices):
    command = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
    kind = ServiceKind.SERVER
    return [ServiceSpec(name="dataflow", kind=kind, command=command, build_env=dict)]

class Stop:
    def update(self, view): stop.number = 15
    def notify(self, text): pass
    def close(self): pass

launching.local_services = services
stop = launching.StopRequest()
result = launching.launch(demo_config(0), RunFolder(Path(sys.argv[1])), display=Stop(), stop=stop)
assert result.signal == 15 and not result.finished
"""
FORK = """
import sys
from pathlib import Path
from penstock.fleet.run_folder import RunFolder
from penstock.runs.fork import fork_run

folder, weights_only = fork_run(RunFolder(Path(sys.argv[1])), [], int(sys.argv[2]), "f")
assert folder.config_file.is_file() and not weights_only
"""
REPLAY = """
import sys
from pathlib import Path
from penstock.errors import StoreError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.replay import num_trainer_ranks, replay_and_compare

folder = RunFolder(Path(sys.argv[1]))
assert num_trainer_ranks(folder, None) == 1
try:
    replay_and_compare(folder, 999, None)
except StoreError as error:
    assert "999 was not published" in str(error)
else:
    raise AssertionError("a step that was never published was replayed")
"""
READ = """
import importlib, pkgutil, sys
import penstock.runs

for found in pkgutil.iter_modules(penstock.runs.__path__):
    importlib.import_module(f"penstock.runs.{found.name}")
assert "torch" not in sys.modules
"""


def run_python(script: str, *args: object) -> None:
    """Run a script that must not import the command line."""
    done = subprocess.run(
        [sys.executable, "-c", script + NO_CLI, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=500,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_every_module_is_importable_alone() -> None:
    run_python(READ)


def test_launch(tmp_path: Path) -> None:
    run_python(LAUNCH, tmp_path / "r")


def test_fork_and_replay(parent: RunFolder) -> None:
    run_python(FORK, parent.path, NUM_STEPS)
    run_python(REPLAY, parent.path)
