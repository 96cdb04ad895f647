# SPDX-License-Identifier: Apache-2.0
"""Models on meshes of every kind train as one process does.

The ranks are processes with gloo between them, forked once for all tests of this file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.unit.trainer.mesh_jobs import (
    EACH,
    EIGHT,
    FOUR,
    RESUMED,
    TWO,
    Job,
    train,
    write_models,
)
from tests.unit.trainer.rank_jobs import forked

from penstock.config.stages import ParallelConfig
from penstock.trainer.ranks.group import SingleRank

MODULE = "tests.unit.trainer.mesh_jobs"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("meshes")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def two(work: Path) -> list[dict[str, Any]]:
    return forked("meshes", 2, work, MODULE)


@pytest.fixture(scope="module")
def four(work: Path) -> list[dict[str, Any]]:
    return forked("meshes", 4, work, MODULE)


@pytest.fixture(scope="module")
def eight(work: Path) -> list[dict[str, Any]]:
    return forked("meshes", 8, work, MODULE)


@cache
def alone(work: Path, base: Any) -> list[tuple[float, float]]:
    kind, steps, is_adapted, algorithm = base
    job = Job(
        kind=kind,
        parallel=ParallelConfig(),
        steps=steps,
        is_adapted=is_adapted,
        algorithm=algorithm,
    )
    return train(work, f"alone {base}", job, SingleRank())


def check(work: Path, ranks: list[dict[str, Any]], name: str, job: Job) -> None:
    curve = alone(work, job.base)
    for rank in ranks:
        assert rank["curves"][name] == ranks[0]["curves"][name]
    np.testing.assert_allclose(ranks[0]["curves"][name], curve, rtol=1e-5, atol=1e-5)
    whole = load_file(work / f"{name}.safetensors")
    own = load_file(work / f"alone {job.base}.safetensors")
    assert whole.keys() == own.keys()
    for key, tensor in own.items():
        torch.testing.assert_close(whole[key], tensor, rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_one_process_does(
    work: Path, two: list[dict[str, Any]], name: str
) -> None:
    check(work, two, name, TWO[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one_process_does(
    work: Path, four: list[dict[str, Any]], name: str
) -> None:
    check(work, four, name, FOUR[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_eight_ranks_train_as_one_process_does(
    work: Path, eight: list[dict[str, Any]], name: str
) -> None:
    check(work, eight, name, EIGHT[name])


@pytest.mark.slow
def test_a_run_goes_on_when_its_mesh_changes(work: Path, four: list[dict[str, Any]]) -> None:
    kind, _, is_adapted, algorithm = FOUR["cp4 heads and ring"].base
    straight = alone(work, (kind, EACH * len(RESUMED), is_adapted, algorithm))
    np.testing.assert_allclose(four[0]["resumed"], straight, rtol=1e-5, atol=1e-5)
