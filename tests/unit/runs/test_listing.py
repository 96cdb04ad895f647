# SPDX-License-Identifier: Apache-2.0
"""`penstock ls`: the runs under a folder, in any state."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from tests.contract.dataflow_server import small_config
from tests.unit.runs.recorded_steps import record_steps

from penstock.cli.main import main
from penstock.errors import ConfigError
from penstock.fleet.run_folder import EndRecord, FinishRecord, LauncherRecord, RunFolder
from penstock.runs.listing import list_runs


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Runs in every state, one that is damaged, and what is no run."""
    root, now = tmp_path / "outputs", time.time()
    for age_s, name in enumerate(("finished", "stopped", "failed", "killed"), start=1):
        folder = RunFolder(root / name)
        asyncio.run(record_steps(folder, small_config(), num_steps=1))
        folder.write_launcher(LauncherRecord(pid=1, started_at=now, attempt=1))
        if name == "finished":
            folder.write_finish(FinishRecord(finished_at=now - 600, steps=1, trajectories=4))
        elif name != "killed":
            error = "no memory" if name == "failed" else ""
            folder.write_end(EndRecord(ended_at=now - 3600 * age_s, signal=15, error=error))
    RunFolder(root / "new").write_config(small_config())
    damaged = root / "damaged"
    damaged.mkdir()
    (damaged / "config.yaml").write_text("nonsense: [")
    (root / "notes").mkdir()
    return root


def test_every_run_is_listed_with_its_state(outputs: Path) -> None:
    runs = {run.name: run for run in list_runs(outputs)}
    assert {name: run.state for name, run in runs.items()} == {
        "finished": "finished",
        "stopped": "stopped",
        "failed": "failed",
        "killed": "killed",
        "new": "new",
        "damaged": "unreadable",
    }
    killed = runs["killed"]
    assert (killed.step, killed.steps, killed.reward) == (1, 3, 0.5)
    assert killed.size_bytes > 10_000 and runs["failed"].why == "no memory"
    assert runs["finished"].age_s == pytest.approx(600, abs=120)


def test_a_running_run_is_running(outputs: Path) -> None:
    folder = RunFolder(outputs / "stopped")
    with folder.locked():
        [run] = list_runs(folder.path)
    assert (run.name, run.state) == ("stopped", "running")


def test_people_get_a_table_and_programs_json(
    capsys: pytest.CaptureFixture[str], outputs: Path, tmp_path: Path
) -> None:
    capsys.readouterr()  # what the fixture logged
    with pytest.raises(SystemExit):
        main(["ls", str(outputs)])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "step", "reward", "last", "active", "size"]
    assert len(rows) == 6
    [finished] = [row for row in rows if row.startswith("finished")]
    assert "1/3" in finished and "0.500" in finished and "10 min ago" in finished
    with pytest.raises(SystemExit):
        main(["ls", str(outputs), "--json"])
    assert len(json.loads(capsys.readouterr().out)["runs"]) == 6
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit):
        main(["ls", str(tmp_path / "empty")])
    assert "no runs in" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is not a folder"):
        list_runs(tmp_path / "absent")
