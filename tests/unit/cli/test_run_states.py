# SPDX-License-Identifier: Apache-2.0
"""`status`, `report`, `stop` of runs without a launcher: services by hand, ended runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
from tests.contract.dataflow_server import small_config
from tests.unit.runs.recorded_steps import record_steps

from penstock.cli.main import main
from penstock.fleet.run_folder import EndRecord, LauncherRecord, RunFolder
from penstock.runs.state import RunState, read_summary
from penstock.wire.auth import Signer


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def until(condition: Callable[[], object], service: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + 120.0
    while not condition():
        assert service.poll() is None, "the service ended"
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.05)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with three of three steps configured and two trained; nothing of it is running."""
    made = RunFolder(tmp_path / "outputs" / "reverse")
    asyncio.run(record_steps(made, small_config(), num_steps=2))
    made.allocate_endpoints(tmp_path, ())
    Signer.create(made.keys, "reverse")
    return made


@pytest.fixture
def by_hand(folder: RunFolder) -> Generator[subprocess.Popen[bytes]]:
    """Its dataflow service alone, as an operator starts it."""
    command = [sys.executable, "-m", "penstock.cli.main", "dataflow", "--run-dir", folder.path]
    with (folder.path / "by-hand.log").open("wb") as log:
        service = subprocess.Popen(command, stderr=log)
        try:
            until(lambda: read_summary(folder).status is not None, service)
            yield service
        finally:
            service.kill()
            service.wait()


def test_services_started_by_hand_are_asked(
    capsys: pytest.CaptureFixture[str], folder: RunFolder, by_hand: subprocess.Popen[bytes]
) -> None:
    code, out, _ = run(capsys, "status", folder.path, "--json")
    answer = json.loads(out.splitlines()[-1])
    assert (code, answer["state"], answer["pid"]) == (0, "running", None)
    assert answer["status"]["policies"][0]["number"] == 2
    code, out, _ = run(capsys, "status", folder.path)
    assert code == 0 and "2/3" in out
    code, out, _ = run(capsys, "report", folder.path)
    assert code == 0 and "time since" in out
    code, _, err = run(capsys, "stop", folder.path)
    assert code == 1 and "has no launcher" in err and "SIGTERM" in err
    assert by_hand.poll() is None
    by_hand.send_signal(signal.SIGTERM)
    asked_at = time.time()
    by_hand.wait(60)
    code, out, err = run(capsys, "report", folder.path, "--json")
    assert code == 0 and "killed; its last report" in err
    stored = json.loads(out)
    assert stored["policies"][0]["trainer_time"]["total_s"] > 0
    assert stored["at"] >= asked_at - 1.0, "it is stored at the end, not only at intervals"
    assert read_summary(folder).state is RunState.KILLED


def test_a_stopped_run_says_how_far_it_got_and_why_it_stopped(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    folder.write_launcher(LauncherRecord(pid=1, started_at=time.time() - 90.0, attempt=1))
    folder.write_end(EndRecord(ended_at=time.time() - 30.0, signal=signal.SIGTERM))
    code, out, _ = run(capsys, "status", folder.path)
    assert code == 0
    for expected in (
        "reverse · stopped by SIGTERM",
        "step 2/3 · reward 0.500",
        "8 trajectories",
        "1:00 after its last start",
        "s ago)",
        f"`penstock run {folder.path}` resumes it",
    ):
        assert expected in out
    code, out, err = run(capsys, "stop", folder.path, "--json")
    assert code == 0 and "(stopped); there is nothing to stop" in err
    assert json.loads(out) == {
        "run": str(folder.path),
        "stopped": False,
        "state": "stopped",
        "step": 2,
    }


def test_a_failed_run_says_why(capsys: pytest.CaptureFixture[str], folder: RunFolder) -> None:
    folder.write_launcher(LauncherRecord(pid=1, started_at=1.0, attempt=1))
    folder.write_end(EndRecord(ended_at=2.0, error="trainer-policy exited with code 1"))
    _, out, _ = run(capsys, "status", folder.path)
    assert "reverse · failed: trainer-policy exited with code 1" in out
    assert read_summary(folder).state is RunState.FAILED


def test_a_run_whose_launcher_was_killed_says_so(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    folder.write_launcher(LauncherRecord(pid=os.getpid(), started_at=1.0, attempt=1))
    _, out, _ = run(capsys, "status", folder.path)
    assert "reverse · killed" in out and "step 2/3" in out and "last sign of life" in out


def test_a_run_that_trained_its_last_step_is_finished_without_a_launcher(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    asyncio.run(record_steps(folder, small_config(steps=2), num_steps=2))
    found = read_summary(folder)
    assert (found.state, found.progress.step, found.pid) == (RunState.FINISHED, 2, None)
