# SPDX-License-Identifier: Apache-2.0
"""Precision, recomputation and offloading on several ranks, dense and with experts.

The ranks are processes with gloo between them, forked once for all tests of this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.unit.trainer.compute_jobs import KINDS, NAMES, train, write_models
from tests.unit.trainer.rank_jobs import forked

from penstock.trainer.ranks.group import SingleRank

GRADIENT_ERROR = 0.02
"""Bound of the relative error of a gradient in bfloat16, whose numbers have 8 bits."""
LOSS_ERROR = 1e-3


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compute")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(work: Path) -> list[dict[str, Any]]:
    return forked("ranks_of", 2, work, "tests.unit.trainer.compute_jobs")


def gradient_error(work: Path, kind: str, one: str, other: str) -> float:
    """How far apart two gradients are, as a share of the second's norm."""
    first, second = (load_file(work / f"{kind}.{name}.safetensors") for name in (one, other))
    assert first.keys() == second.keys()
    away = torch.stack([(first[key] - second[key]).norm() for key in second]).norm()
    return float(away / torch.stack([value.norm() for value in second.values()]).norm())


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_and_offloading_change_no_bit(
    ranks: list[dict[str, Any]], work: Path, kind: str
) -> None:
    for rank, name in ((rank, name) for rank in ranks for name in NAMES[kind] if "+" in name):
        plain = name.partition("+")[0]
        assert rank[kind][name]["curve"] == rank[kind][plain]["curve"]
        assert gradient_error(work, kind, f"{name}.2", f"{plain}.2") == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_recomputing_a_layer_repeats_its_matmuls_and_selective_does_not(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    found = {name: ranks[0][kind][name]["num_matmuls"] for name in ranks[0][kind]}
    assert found["bfloat16"] < found["bfloat16+layer"]
    if kind == "dense":
        assert found["bfloat16"] == found["bfloat16+selective"]


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_float32(ranks: list[dict[str, Any]], work: Path, kind: str) -> None:
    assert 0 < gradient_error(work, kind, "bfloat16.2", "float32.2") < GRADIENT_ERROR
    curves = [
        [loss for loss, _ in ranks[0][kind][name]["curve"]] for name in ("bfloat16", "float32")
    ]
    np.testing.assert_allclose(*curves, rtol=0, atol=LOSS_ERROR)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_round_as_one_does(ranks: list[dict[str, Any]], work: Path, kind: str) -> None:
    alone = train(work, kind, "bfloat16", SingleRank())
    np.testing.assert_allclose(ranks[0][kind]["bfloat16"]["curve"][0], alone["curve"][0], rtol=0.01)
    assert gradient_error(work, kind, "bfloat16.2", "bfloat16.1") < GRADIENT_ERROR / 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bfloat16", "bfloat16+layer"])
def test_every_matmul_of_a_step_is_in_bfloat16(
    ranks: list[dict[str, Any]], kind: str, name: str
) -> None:
    dtypes = dict(ranks[0][kind][name]["dtypes"])
    assert ("_grouped_mm" in dtypes) == (kind == "moe")
    assert dtypes.pop("_allgather_base_") == ["bfloat16"]
    assert dtypes.pop("_reduce_scatter_base_") == ["float32"]
    assert {dtype for found in dtypes.values() for dtype in found} == {"bfloat16"}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_gradients_and_moments_are_sharded_and_in_float32(
    ranks: list[dict[str, Any]], kind: str
) -> None:
    for rank, name in ((rank, name) for rank in ranks for name in NAMES[kind]):
        assert rank[kind][name]["held_dtypes"] == ["torch.float32"]
        assert rank[kind][name]["share"] == pytest.approx(
            {"weights": 0.5, "gradients": 0.5, "moments": 0.5}, abs=0.02
        )


def test_nothing_that_was_gathered_outlives_a_pass_without_a_backward_pass(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["share_after_inference"] for rank in ranks] == pytest.approx([0.5] * 2, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_are_near_two(work: Path, ranks: list[dict[str, Any]], kind: str) -> None:
    if not (work / "ranks_of.3.json").exists():
        forked("ranks_of", 4, work, "tests.unit.trainer.compute_jobs")
    for name in ("bfloat16+layer.4", "bfloat16+layer.2"):
        assert 0 < gradient_error(work, kind, name, "float32.4") < GRADIENT_ERROR
    assert gradient_error(work, kind, "float32.4", "float32.2") < 1e-5
