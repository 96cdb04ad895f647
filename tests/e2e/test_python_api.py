# SPDX-License-Identifier: Apache-2.0
"""A first run from Python: one file, a mapping, a custom reward; and clients of live services."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.system import PENSTOCK, until

import penstock
from penstock.errors import WireError
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Signer

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


@pytest.fixture
def dataflow(tmp_path: Path) -> Iterator[RunFolder]:
    """A run of which only the dataflow is up."""
    folder = RunFolder(tmp_path / "run")
    values = {"models": {"policy": {"init": "builtin:tiny-qwen3"}}, "training": {"steps": 2}}
    sources = [{"name": "train", "task": "penstock.tasks.reverse"}]
    folder.write_config(penstock.load_config({**values, "name": "run", "sources": sources}))
    Signer.create(folder.keys, "run")
    folder.allocate_endpoints(tmp_path, ())
    words = [*PENSTOCK, "dataflow", "--run-dir", str(folder.path)]
    with (tmp_path / "dataflow.log").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=out)
    yield folder
    process.kill()
    process.wait()


async def test_clients_of_rows_and_control_reach_a_live_run(dataflow: RunFolder) -> None:
    control = penstock.ControlClient(dataflow.path)

    def is_up() -> bool:
        try:
            return control.status().run == "run"
        except WireError:
            return False

    until(is_up, timeout_s=300.0, what="the dataflow answers")
    assert control.report().run == "run"
    async with penstock.RowsClient(control.url, control.token("stage"), patience_s=60.0) as rows:
        await rows.put("eval", {"q1": {"text": b"2 + 2"}})
        reader = await rows.reader("marker", space="eval", reads=["text"], writes=["mark"])
        async for row in reader.stream():
            text = row["text"]
            assert isinstance(text, bytes)
            await row.write(mark=float(len(text)))
            break
        found = await rows.get("eval", ["q1", "q2"])
    assert found.keys() == {"q1"} and found["q1"].columns["mark"] == 5.0
    with pytest.raises(penstock.PenstockError, match="unknown-session"):
        control.forget_session("unknown-session")
