# SPDX-License-Identifier: Apache-2.0
"""A run whose reward always fails ends by itself; mended and moved to another path, it goes on."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.e2e.system import PENSTOCK, penstock, until

STEPS = 3
SETTINGS = (
    f"training.steps={STEPS}",
    "training.groups_per_batch=4",
    "algorithm.num_generations=4",
    "models.policy.replicas=1",
)
BROKEN = """

def reward(completions: list[str], **_: Any) -> list[float]:
    if Path(__file__).with_name("broken").exists():
        raise ValueError("the judge is down")
    return [float(len(set(text))) for text in completions]
"""


def test_a_failing_run_ends_with_the_cause_and_goes_on_mended_and_moved(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.mkdir()
    assert penstock("init", "mine", cwd=old).returncode == 0
    task = old / "mine" / "task.py"
    task.write_text("from pathlib import Path\n" + task.read_text() + BROKEN)
    run_folder = Path("outputs") / "mine"
    ended = _run_and_break(old, run_folder)
    assert ended.returncode == 1, ended.stderr
    cause = json.loads(ended.stdout.splitlines()[-1])["error"]
    assert "failed: reward: ValueError: the judge is down" in cause and "penstock run" in cause

    (old / "mine" / "broken").unlink()
    task.write_text(task.read_text() + "# mended\n")
    new = tmp_path / "elsewhere"
    old.rename(new)
    done = penstock("run", str(new / run_folder), "--headless", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == STEPS
    note = "your code changed since the last start: task (edited); it applies after step 0"
    assert note in done.stderr
    assert note in (new / run_folder / "logs" / "latest" / "launcher.log").read_text()
    assert note in (new / run_folder / "notes.jsonl").read_text()
    assert penstock("audit", str(new / run_folder)).returncode == 0


def _run_and_break(cwd: Path, run_folder: Path) -> subprocess.CompletedProcess[str]:
    """The reward works when the run is checked, and fails from then on."""
    command = [*PENSTOCK, "run", "mine/run.yaml", *SETTINGS, "--headless", "--json"]
    process = subprocess.Popen(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    started = cwd / run_folder / "run" / "endpoints.json"
    until(started.exists, timeout_s=600.0, what="the start of the run")
    (cwd / "mine" / "broken").touch()
    out, err = process.communicate(timeout=900.0)
    return subprocess.CompletedProcess(command, process.returncode, out, err)
