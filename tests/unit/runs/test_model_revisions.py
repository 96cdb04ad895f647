# SPDX-License-Identifier: Apache-2.0
"""Which keys of a config name a model that a run fetches; tests of the Hub are in `contract`."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.config import RunConfig, demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.runs.model_revisions import pin_models

COMMIT = "0123456789abcdef0123456789abcdef01234567"
STAGES = """pipeline={stages: [
  {id: judge, type: infer, role: judge, reads: [turns], writes: [scores], fn: 'mine:judge',
   place: [gpu], model: far/away},
  {id: ref, type: infer, role: reference, reads: [turns], writes: [reference_logprobs],
   model: tests/ref},
  {id: advantage, type: compute, role: advantage, reads: [reward], writes: [advantage]},
  {id: train, type: train, role: actor, reads: [turns, advantage, reference_logprobs], writes: []}
]}""".replace("\n", " ")


OLD = COMMIT[::-1]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models in the cache of the Hub, whose newest commit is COMMIT; there is no network."""
    for name in ("init", "ref", "shared", "own"):
        folder = tmp_path / "hub" / f"models--tests--{name}"
        for commit in (COMMIT, OLD):
            (folder / "snapshots" / commit).mkdir(parents=True)
            for file in ("config.json", "model.safetensors"):
                (folder / "snapshots" / commit / file).touch()
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def config(*overrides: str) -> RunConfig:
    return demo_config(0, overrides)


def test_every_model_that_a_trainer_loads_is_pinned(tmp_path: Path) -> None:
    given = config("models.policy.init=tests/init", "algorithm.beta=0.1", STAGES)
    pinned = pin_models(given, RunFolder(tmp_path), print)
    assert pinned.models["policy"].init == f"tests/init@{COMMIT}"
    assert pinned.pipeline is not None
    models = {stage.id: stage.model for stage in pinned.pipeline.stages if stage.model}
    assert models == {"judge": "far/away", "ref": f"tests/ref@{COMMIT}"}


def test_the_teachers_of_all_policies_are_pinned(tmp_path: Path) -> None:
    own = "models.second={init: 'builtin:tiny-qwen3', algorithm: {name: opd, teacher: tests/own}}"
    given = config("algorithm.name=opd", "algorithm.teacher=tests/shared", own)
    pinned = pin_models(given, RunFolder(tmp_path), print)
    assert pinned.algorithm.teacher == f"tests/shared@{COMMIT}"
    assert pinned.for_policy("second").algorithm.teacher == f"tests/own@{COMMIT}"


def test_a_config_without_models_of_the_hub_is_unchanged(tmp_path: Path) -> None:
    given = config()
    assert pin_models(given, RunFolder(tmp_path), pytest.fail) is given


def test_a_run_keeps_its_commits(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_config(config(f"models.policy.init=tests/init@{OLD}"))
    pinned = pin_models(config("models.policy.init=tests/init"), folder, pytest.fail)
    assert pinned.models["policy"].init == f"tests/init@{OLD}"
