# SPDX-License-Identifier: Apache-2.0
"""Versions as initial models: which one a name means, the copy that a run keeps, and what is
refused with a cure."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from penstock.config import RunConfig, demo_config
from penstock.config.resolved import identity, identity_changes
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.initial_versions import INITIAL, find, linked_versions
from penstock.runs.model_revisions import pin_models
from penstock.runs.preflight import find_problems
from penstock.runs.target import RunTarget
from penstock.trainer.model_folders import init_model
from penstock.types import PolicyName
from penstock.weights.publish import StoredVersion, put_snapshot

OPPONENT = "models.opponent={{init: {}, frozen: true, replicas: 0}}"


def publish(run: RunFolder, policy: str, numbers: int) -> list[StoredVersion]:
    """So many versions, each with weights of its own."""
    stored: list[StoredVersion] = []
    for number in range(numbers):
        model = run.path / f"model-{policy}-{number}"
        init_model("builtin:tiny-qwen3", model, seed=number)
        stored.append(
            put_snapshot(
                run.weights,
                model,
                policy=PolicyName(policy),
                number=number,
                after=stored[-1] if stored else None,
            )
        )
        shutil.rmtree(model)
    return stored


@pytest.fixture
def other(tmp_path: Path) -> RunFolder:
    """Another run, with versions 0 to 2 of `policy`."""
    folder = RunFolder(tmp_path / "other")
    folder.write_config(demo_config(0, ()))
    publish(folder, "policy", 3)
    return folder


def config(*overrides: str) -> RunConfig:
    return demo_config(0, overrides)


def weights(folder: str) -> bytes:
    return (Path(folder) / "model.safetensors").read_bytes()


def initial_weights(tmp_path: Path, seed: int) -> bytes:
    init_model("builtin:tiny-qwen3", tmp_path / f"seed-{seed}", seed=seed)
    return weights(str(tmp_path / f"seed-{seed}"))


@pytest.mark.parametrize(
    ("reference", "number"), [("", 2), ("@1", 1), ("@policy", 2), ("@policy@0", 0)]
)
def test_a_run_starts_from_a_version_of_another_and_keeps_a_copy(
    other: RunFolder, tmp_path: Path, reference: str, number: int
) -> None:
    mine, told = RunFolder(tmp_path / "mine"), list[str]()
    given = config(f"models.policy.init=run:{other.path}{reference}")
    pinned = pin_models(given, mine, told.append)
    init = pinned.models["policy"].init
    assert Path(init).parent == mine.path / INITIAL
    assert weights(init) == initial_weights(tmp_path, number)
    assert f"version policy@{number}" in told[0]
    assert json.loads(Path(init).with_suffix(".json").read_text())["version"] == f"policy@{number}"


def test_a_resumed_run_keeps_its_version_although_the_other_went_on_or_is_gone(
    other: RunFolder, tmp_path: Path
) -> None:
    mine = RunFolder(tmp_path / "mine")
    given = config(f"models.policy.init=run:{other.path}")
    first = pin_models(given, mine, lambda _: None)
    publish(other, "policy", 4)
    assert pin_models(given, mine, pytest.fail) == first
    assert pin_models(first, mine, pytest.fail) == first
    shutil.rmtree(other.path)
    assert pin_models(given, mine, pytest.fail) == first


def test_a_run_that_was_moved_finds_its_copy(other: RunFolder, tmp_path: Path) -> None:
    mine = RunFolder(tmp_path / "mine")
    first = pin_models(config(f"models.policy.init=run:{other.path}"), mine, lambda _: None)
    mine.path.rename(tmp_path / "moved")
    again = pin_models(first, RunFolder(tmp_path / "moved"), pytest.fail)
    assert again.models["policy"].init.startswith(str(tmp_path / "moved"))
    assert identity_changes(identity(first), identity(again)) == []


def test_a_damaged_version_is_refused_and_nothing_is_kept(other: RunFolder, tmp_path: Path) -> None:
    mine = RunFolder(tmp_path / "mine")
    found = find(f"run:{other.path}@0", mine)
    [blob] = [f.entry.blob for f in found.version.files if f.entry.name == "model.safetensors"]
    path = found.store.blob_path(blob)
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is damaged; `penstock weights verify"):
        pin_models(config(f"models.policy.init=run:{other.path}@0"), mine, print)
    assert list((mine.path / INITIAL).iterdir()) == []


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("@9", "version '9' not found in this store; did you mean policy@2"),
        ("@solver@1", "did you mean policy@1"),
    ],
)
def test_a_version_that_is_not_there_is_refused_with_those_that_are(
    other: RunFolder, tmp_path: Path, reference: str, message: str
) -> None:
    given = config(f"models.policy.init=run:{other.path}{reference}")
    with pytest.raises(ConfigError, match=message):
        pin_models(given, RunFolder(tmp_path / "mine"), print)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    given = config(f"models.policy.init=run:{tmp_path}/nothing")
    with pytest.raises(ConfigError, match="is not a run folder"):
        pin_models(given, RunFolder(tmp_path / "mine"), print)


def test_a_run_of_several_policies_needs_the_name_of_one(other: RunFolder, tmp_path: Path) -> None:
    publish(other, "solver", 1)
    with pytest.raises(ConfigError, match="has the policies policy, solver; add one, like run:"):
        find(f"run:{other.path}", RunFolder(tmp_path / "mine"))
    found = find(f"run:{other.path}@solver", RunFolder(tmp_path / "mine"))
    assert found.version.name == "solver@0"


def test_version_0_of_this_run_is_always_there(tmp_path: Path) -> None:
    given = config(OPPONENT.format("policy@0"))
    pinned = pin_models(given, RunFolder(tmp_path / "mine"), pytest.fail)
    assert pinned.models["opponent"].init == pinned.models["policy"].init == "builtin:tiny-qwen3"


def test_a_later_version_of_this_run_must_exist(tmp_path: Path) -> None:
    mine = RunFolder(tmp_path / "mine")
    given = config(OPPONENT.format("policy@2"))
    with pytest.raises(ConfigError, match="has not begun, so policy has version 0 alone; write"):
        pin_models(given, mine, print)
    mine.write_config(config())
    publish(mine, "policy", 2)
    with pytest.raises(ConfigError, match="did you mean policy@1"):
        pin_models(given, mine, print)
    pinned = pin_models(config(OPPONENT.format("policy@1")), mine, lambda _: None)
    assert weights(pinned.models["opponent"].init) == initial_weights(tmp_path, 1)


def test_a_frozen_policy_of_a_run_that_began_keeps_its_weights(tmp_path: Path) -> None:
    mine = RunFolder(tmp_path / "mine")
    mine.write_config(config(OPPONENT.format("'builtin:tiny-qwen3'")))
    publish(mine, "policy", 2)
    with pytest.raises(ConfigError, match="a frozen policy keeps its weights; add the new one"):
        pin_models(config(OPPONENT.format("policy@1")), mine, lambda _: None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.policy.init=policy@3", "from which no trained policy can start; set frozen: true"),
        (OPPONENT.format("solver@3"), "unknown policy in training"),
        (OPPONENT.format("opponent@0"), "unknown policy in training"),
        ("models.policy.init=run:@3", "names no run; write run:FOLDER"),
    ],
)
def test_a_config_that_names_no_version_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(override)


def test_a_check_reads_the_version_and_writes_nothing(other: RunFolder, tmp_path: Path) -> None:
    mine = RunFolder(tmp_path / "mine")
    right = RunTarget(
        config=config(f"models.policy.init=run:{other.path}@1"), folder=mine, python_path=()
    )
    with linked_versions(right) as seen:
        folder = seen.config.models["policy"].init
        assert weights(folder) == initial_weights(tmp_path, 1)
        assert [one for one in find_problems(seen) if one.key.startswith("models")] == []
    assert not mine.path.exists() and not Path(folder).exists()
    wrong = RunTarget(
        config=config(f"models.policy.init=run:{other.path}@7"), folder=mine, python_path=()
    )
    with linked_versions(wrong, skip_missing=True) as seen:
        [problem] = [one for one in find_problems(seen) if one.key.startswith("models")]
    assert problem.key == "models.policy.init" and "did you mean policy@2" in problem.text
    with pytest.raises(ConfigError, match="did you mean policy@2"), linked_versions(wrong):
        pass
