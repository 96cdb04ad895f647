# SPDX-License-Identifier: Apache-2.0
"""A first run from Python: one file, a mapping, a reward of one's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import penstock

@penstock.reward
def right_letters(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(completion, answer)) / len(answer)

if __name__ == "__main__":
    print(penstock.run({
        "name": "first", "reward": "first_run:right_letters",
        "models": {"policy": {"init": "builtin:tiny-qwen3"}},
        "sources": [{"name": "train", "task": "penstock.tasks.reverse"}],
        "algorithm": {"num_generations": 4},
        "training": {"steps": 2, "groups_per_batch": 4},
    }).steps)
"""


@pytest.mark.timeout(600)
def test_a_first_run_in_fourteen_lines(tmp_path: Path) -> None:
    assert len([line for line in SCRIPT.splitlines() if line.strip()]) <= 14
    code = tmp_path / "code"
    code.mkdir()
    (code / "first_run.py").write_text(SCRIPT)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = [sys.executable, str(code / "first_run.py")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=elsewhere, env=env, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2\n" and done.stderr == "", "it prints nothing itself"
    lines = (elsewhere / "outputs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert lines and all(json.loads(line) for line in lines)
