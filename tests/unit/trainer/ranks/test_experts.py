# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: two ranks with half of the experts each learn what two with all of them do.

The ranks are processes with gloo between them, forked once for all tests of this file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.fake_ranks import fake_process_group
from safetensors.torch import load_file
from tests.unit.trainer.compute_jobs import write_models
from tests.unit.trainer.expert_jobs import BETWEEN, MESHES
from tests.unit.trainer.rank_jobs import forked
from tests.unit.trainer.test_file_tensors import small_moe
from tests.unit.trainer.test_packing_check import make_tiny

from penstock.config.stages import ParallelConfig
from penstock.errors import ConfigError
from penstock.trainer.ranks.group import make_rank_group
from penstock.trainer.ranks.sharding import shard


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def ranks(work: Path) -> list[dict[str, Any]]:
    return forked("spread", 2, work, "tests.unit.trainer.expert_jobs")


def test_twenty_steps_are_the_same_with_half_of_the_experts_on_each_rank(
    ranks: list[dict[str, Any]], work: Path
) -> None:
    for rank in ranks:
        np.testing.assert_allclose(
            rank["curve"]["dp2ep2"], rank["curve"]["dp2"], rtol=1e-5, atol=1e-5
        )
        assert rank["share"] == {"dp2": pytest.approx(0.5), "dp2ep2": pytest.approx(0.5)}
    plain, spread = (load_file(work / f"{name}.end.safetensors") for name in MESHES)
    initial = load_file(work / "moe" / "model.safetensors")
    assert plain.keys() == spread.keys() == initial.keys()
    moved = max(float((plain[key] - initial[key]).abs().max()) for key in plain)
    away = max(float((plain[key] - spread[key]).abs().max()) for key in plain)
    assert moved > 1e-3, "nothing was learned"
    assert away < 1e-5


def test_ranks_write_the_files_that_are_gathered(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["is_written"] == dict.fromkeys(MESHES, True)


def test_a_checkpoint_goes_on_with_another_number_of_expert_ranks(
    ranks: list[dict[str, Any]],
) -> None:
    straight = ranks[0]["curve"]["dp2"][BETWEEN:]
    assert len(ranks[0]["resumed"]) == 2
    for curve in ranks[0]["resumed"].values():
        np.testing.assert_allclose(curve, straight, rtol=1e-5, atol=1e-5)


def test_every_matmul_of_a_step_is_in_bfloat16(ranks: list[dict[str, Any]]) -> None:
    for found in ranks[0]["operations"].values():
        dtypes = dict(found["dtypes"])
        assert dtypes.pop("_allgather_base_") == ["bfloat16"]
        assert dtypes.pop("_reduce_scatter_base_") == ["float32"]
        assert "_grouped_mm" in dtypes
        assert {dtype for one in dtypes.values() for dtype in one} == {"bfloat16"}
        np.testing.assert_allclose(found["curve"][0], ranks[0]["curve"]["dp2"][0], rtol=0.02)


@pytest.mark.parametrize("ep, message", [(4, "6 experts"), (2, "no fused experts")])
def test_what_cannot_be_spread_is_refused(ep: int, message: str) -> None:
    model = small_moe() if ep == 4 else make_tiny("qwen3", {})
    with fake_process_group(4, 1):
        ranks = make_rank_group(ParallelConfig(dp=4, ep=ep))
        assert ranks is not None
        with pytest.raises(ConfigError, match=message):
            shard(model, model, ranks)


def test_a_rank_without_visits_takes_part() -> None:
    """No token chooses an expert of this rank: its products have no rows, and gradients of 0."""
    experts: Any = small_moe().model.layers[0].mlp.experts
    rows = torch.zeros(0, 32, requires_grad=True)
    made = experts(rows, torch.zeros(0, 1, dtype=torch.int64), torch.ones(0, 1))
    made.backward(torch.zeros_like(made))
    gradients = [parameter.grad for parameter in experts.parameters()]
    assert all(one is not None and not one.any() for one in gradients)
