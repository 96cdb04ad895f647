# SPDX-License-Identifier: Apache-2.0
"""A deterministic run whose trackers are dead for its first half, and which is killed three times:
their curves are those of a run that nobody disturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.system import SMALL, System, beside_a_straight_one, penstock

from penstock.fleet.ports import free_port
from penstock.plugins import load_module
from penstock.trainer.replay import is_compared

pytestmark = pytest.mark.slow
STEPS = 10
WORDS = (*SMALL, "deterministic=true", "report_to=[trackio, tensorboard]")
SERVER = "import sys, trackio; trackio.show(open_browser=False, server_port=int(sys.argv[1]))"
ROWS = """
import json
from trackio.sqlite_storage import SQLiteStorage
(run,) = SQLiteStorage.get_runs("penstock")
print(json.dumps(SQLiteStorage.get_logs("penstock", run)))
"""
Curves = dict[str, list[tuple[int, float]]]


def tensorboard_curves(system: System) -> Curves:
    accumulators: Any = load_module("tensorboard.backend.event_processing.event_accumulator")
    found = accumulators.EventAccumulator(
        str(system.folder.path / "tensorboard" / "policy"), size_guidance={"scalars": 0}
    )
    found.Reload()
    return {
        name: [(event.step, event.value) for event in found.Scalars(name)]
        for name in found.Tags()["scalars"]
        if is_compared(name)
    }


def trackio_curves(folder: Path) -> Curves:
    env = {**os.environ, "TRACKIO_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", ROWS], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    curves: Curves = {}
    for row in json.loads(done.stdout.splitlines()[-1]):
        for name, value in row.items():
            if is_compared(name) and name not in ("step", "timestamp"):
                curves.setdefault(name, []).append((row["step"], value))
    return curves


@contextmanager
def trackio_server(folder: Path, port: int, token: str) -> Generator[None]:
    env = {**os.environ, "TRACKIO_DIR": str(folder), "TRACKIO_WRITE_TOKEN": token}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], env=env, stdout=subprocess.DEVNULL
    )
    try:
        yield
    finally:
        server.terminate()
        server.wait(60)


def test_dead_trackers_and_three_restarts_change_no_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with beside_a_straight_one(tmp_path, "run") as (straight, system):
        monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "local"))
        straight.start(*WORDS)
        assert straight.wait() == 0, straight.output()

        port, token = free_port(), "a-token-of-this-test"
        monkeypatch.setenv("TRACKIO_SERVER_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TRACKIO_WRITE_TOKEN", token)
        system.folder.path.mkdir(mode=0o700)
        (system.folder.path / "tensorboard").write_text("a disk that is not there")
        system.start(*WORDS)
        system.until_step(STEPS // 2)
        assert not any((tmp_path / "server").glob("*.db"))
        (system.folder.path / "tensorboard").unlink()
        with trackio_server(tmp_path / "server", port, token):
            for step in (6, 7, 8):
                system.until_step(step)
                assert system.launcher is not None
                system.launcher.send_signal(signal.SIGKILL if step == 7 else signal.SIGTERM)
                system.wait()
                system.start()
            assert system.wait() == 0, system.output()
            done = penstock("track", str(system.folder.path))
            assert done.returncode == 0, done.stderr
        left = [line for line in done.stderr.splitlines() if "0 new points" not in line]
        assert len(left) <= 1, "the exporter of the run sent nearly everything by itself"

        expected = tensorboard_curves(straight)
        assert [step for step, _ in expected["reward/mean"]] == list(range(1, STEPS + 1))
        assert tensorboard_curves(system) == expected
        assert trackio_curves(tmp_path / "server") == trackio_curves(tmp_path / "local")


def test_a_run_waits_for_no_tracker(
    system: System, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One hangs for ever: the run ends as it should, and the tracker beside it has the curve."""
    (tmp_path / "hanging.py").write_text(
        "import threading\n"
        "class Tracker:\n"
        "    def __init__(self, run): pass\n"
        "    def send(self, points): threading.Event().wait()\n"
        "    def close(self): pass\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    system.start(*SMALL, "report_to=[hanging:Tracker, tensorboard]")
    assert system.wait() == 0, system.output()
    assert len(tensorboard_curves(system)["reward/mean"]) == STEPS
