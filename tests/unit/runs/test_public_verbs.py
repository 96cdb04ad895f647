# SPDX-License-Identifier: Apache-2.0
"""`penstock.run`, `check`, `fork`, `replay`, `load_config` and `ControlClient`: what they take, and
what they refuse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.runs.test_fork import NUM_STEPS, parent

import penstock
import penstock.runs.launch as launching
from penstock.config import RunConfig
from penstock.errors import StoreError
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.services import ServiceKind, ServiceSpec
from penstock.runs.launch import StopRequest
from penstock.runs.monitor import RunView
from penstock.wire.auth import Audience, Role, Signer, Verifier

__all__ = ["parent"]


@pytest.fixture
def values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A whole config, as a user's script holds it."""
    monkeypatch.chdir(tmp_path)
    return {
        "name": "first",
        "models": {"policy": {"init": "builtin:tiny-qwen3"}},
        "sources": [{"name": "train", "task": "penstock.tasks.reverse"}],
        "reward": "penstock.tasks.reverse:reward",
        "training": {"steps": 20},
    }


def test_a_config_is_the_same_from_a_mapping_a_file_a_folder_and_itself(
    values: dict[str, Any], tmp_path: Path
) -> None:
    config = penstock.load_config(values)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    folder = RunFolder(tmp_path / "outputs" / "first")
    folder.write_config(config)
    for same in (config, file, str(file), folder.path):
        assert penstock.load_config(same) == config
        changed = penstock.load_config(same, overrides=["training.steps=7"])
        assert changed.training.steps == 7 and changed.name == "first"


def test_mistakes_in_a_mapping_are_all_named(values: dict[str, Any]) -> None:
    values["training"]["step"] = 3
    values["reward"] = "nothing here"
    with pytest.raises(penstock.ConfigError) as caught:
        penstock.load_config(values)
    text = str(caught.value)
    assert 'training.step: unknown key; did you mean "steps"?' in text
    assert 'reward: "nothing here" is not valid here' in text
    with pytest.raises(penstock.ConfigError, match="name functions as module:function"):
        penstock.load_config(values | {"reward": len})


def test_check_returns_every_problem(values: dict[str, Any], tmp_path: Path) -> None:
    assert penstock.check(values) == ()
    [unknown] = penstock.check(values | {"seeds": 1})
    assert 'did you mean "seed"' in unknown
    missing, *_ = penstock.check(values | {"reward": "own_grader:score"})
    assert "own_grader" in missing
    grader = "def score(completions):\n    return [0.5] * len(completions)\n"
    (tmp_path / "own_grader.py").write_text(grader)
    assert penstock.check(values | {"reward": "own_grader:score"}) == (), "in the working directory"


class StopAtOnce:
    """A display that ends the run as soon as it is shown something."""

    def __init__(self, stop: StopRequest) -> None:
        self.stop = stop

    def update(self, view: RunView) -> None:
        self.stop.number = 15

    def notify(self, text: str) -> None: ...

    def close(self) -> None: ...


def test_run_takes_a_mapping_and_remembers_where_your_modules_are(
    values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one service that only sleeps; whole runs are in tests/e2e."""

    def services(config: RunConfig, folder: RunFolder, devices: object) -> list[ServiceSpec]:
        command = (sys.executable, "-S", "-c", "import time; time.sleep(600)")
        server = ServiceKind.SERVER
        return [ServiceSpec(name="dataflow", kind=server, command=command, build_env=dict)]

    monkeypatch.setattr(launching, "local_services", services)
    stop = StopRequest()
    result = penstock.run(
        values, overrides=["training.steps=3"], display=StopAtOnce(stop), stop=stop
    )
    assert (result.signal, result.finished) == (15, False)
    folder = RunFolder(Path(result.folder))
    assert folder.path == tmp_path / "outputs" / "first"
    assert folder.read_config().training.steps == 3
    assert str(tmp_path) in folder.python_path()
    again = StopRequest()
    assert penstock.run(folder.path, display=StopAtOnce(again), stop=again).signal == 15
    with pytest.raises(penstock.ConfigError, match="started with a different config"):
        penstock.run(values | {"seed": 9})


def test_what_cannot_start_is_refused_before_anything_is_written(
    values: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(penstock.ConfigError, match="own_grader"):
        penstock.run(values | {"reward": "own_grader:score"})
    assert not (tmp_path / "outputs").exists()


def test_fork_and_replay(parent: RunFolder) -> None:
    forked = penstock.fork(parent.path, NUM_STEPS, name="next", overrides=["seed=5"])
    assert forked == parent.path.parent / "next"
    assert penstock.load_config(forked).seed == 5
    with pytest.raises(penstock.ConfigError, match="Choose one of these steps"):
        penstock.fork(parent.path, 77)
    with pytest.raises(StoreError, match="999 was not published"):
        penstock.replay(parent.path, 999)


def test_a_control_client_reaches_a_run_through_its_folder(
    values: dict[str, Any], tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "outputs" / "first")
    folder.write_config(penstock.load_config(values))
    Signer.create(folder.keys, "first")
    endpoints = folder.allocate_endpoints(tmp_path, ())
    control = penstock.ControlClient(folder.path)
    assert control.url == endpoints.dataflow
    verifier = Verifier.read(folder.keys, run="first", audience=Audience.DATAFLOW)
    assert verifier.verify(control.token("stage")).role is Role.STAGE
    assert control.stop() is False, "it is not running"
    with pytest.raises(penstock.ConfigError, match="not a run folder"):
        penstock.ControlClient(tmp_path)
