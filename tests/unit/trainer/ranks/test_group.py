# SPDX-License-Identifier: Apache-2.0
"""Two ranks against one: the same losses, the same weights, the same budget, each its own rows.

The ranks are processes with gloo between them, forked once for all quick tests of this file.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.unit.trainer.rank_jobs import (
    CREWS,
    GATHERED,
    LORA,
    MORTAL_STEPS,
    NUM_STEPS,
    TENSOR_STEPS,
    forked,
    learned,
    pressures_of,
    supervised,
    train,
)
from tests.unit.trainer.test_packing_check import make_tiny
from transformers import PreTrainedModel

from penstock.config import LoraConfig
from penstock.trainer.algorithms.m2po import M2poBudget
from penstock.trainer.lora import init_adapter
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.ranks.sharding import clip, gather, shard, shard_like


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    shutil.copytree(model_folder, folder / "model")
    shutil.copytree(model_folder, folder / "adapted")
    init_adapter(folder / "adapted", LoraConfig.model_validate(LORA), seed=0)
    make_tiny("llama", {"tie_word_embeddings": True}).save_pretrained(folder / "tied")
    return folder


@pytest.fixture(scope="module")
def ranks(work: Path) -> list[dict[str, Any]]:
    return forked("pair", 2, work)


def test_two_ranks_train_as_one_process_does(
    ranks: list[dict[str, Any]], work: Path, new_model: Callable[[], PreTrainedModel]
) -> None:
    loop, curve = train(new_model(), SingleRank(), range(NUM_STEPS))
    assert ranks[0]["curve"] == ranks[1]["curve"]
    np.testing.assert_allclose(ranks[0]["curve"], curve, rtol=1e-5, atol=1e-5)
    whole = load_file(work / "whole.safetensors")
    own = loop.model.state_dict()
    assert whole.keys() == own.keys()
    for name, tensor in own.items():
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("name", CREWS)
def test_the_learners_of_two_ranks_learn_as_those_of_one(
    ranks: list[dict[str, Any]], work: Path, name: str
) -> None:
    """Packed batches, uneven rows, mini-batches, a budget over both ranks, a critic, an adapter."""
    curve, weights = learned(work, name, SingleRank())
    assert ranks[0]["crews"][name] == ranks[1]["crews"][name]
    np.testing.assert_allclose(ranks[0]["crews"][name], curve, rtol=1e-5, atol=1e-5)
    if name in GATHERED:
        whole = load_file(work / f"{name}.safetensors")
        assert whole.keys() == weights.keys()
        for key, tensor in weights.items():
            torch.testing.assert_close(whole[key], tensor, rtol=0, atol=1e-4, msg=key)


def test_each_rank_holds_half_of_the_model_and_only_the_first_gathers_it(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["local_share"] for rank in ranks] == pytest.approx([0.5, 0.5], abs=0.01)
    assert ranks[0]["gathered"] > 0
    assert ranks[1]["gathered"] == 0


def test_a_gang_restored_from_gathered_state_goes_on_bit_for_bit(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["resumed"] == ranks[0]["went_on"]


def test_tensor_parallel_ranks_train_as_one_process_does(
    ranks: list[dict[str, Any]], work: Path, new_model: Callable[[], PreTrainedModel]
) -> None:
    loop, curve = train(new_model(), SingleRank(), range(TENSOR_STEPS))
    np.testing.assert_allclose(ranks[0]["tensor_curve"], curve, rtol=1e-5, atol=1e-5)
    whole = load_file(work / "tensor_whole.safetensors")
    for name, tensor in loop.model.state_dict().items():
        torch.testing.assert_close(whole[name], tensor, rtol=0, atol=1e-4, msg=name)


def test_a_budget_over_two_ranks_is_that_of_one(ranks: list[dict[str, Any]]) -> None:
    alone = SingleRank().gather_over_ranks(pressures_of(0, 1))
    for rank in ranks:
        gathered = torch.tensor(rank["pressures"])
        assert torch.equal(gathered.sort().values, alone.sort().values)
        assert M2poBudget(budget=0.04).with_budget(gathered) == M2poBudget(budget=0.04).with_budget(
            alone
        )


def test_no_rank_sees_more_than_its_own_share_of_the_payload(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["drawn"]["through"] <= rank["drawn"]["all"] / 2 * 1.05
        assert rank["drawn"]["is_right"]
    own = [row for rank in ranks for row in rank["drawn"]["own"]]
    assert sorted(own) == list(range(64))


def test_of_the_ranks_of_one_part_only_the_first_fetches(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["drawn_inside"] for rank in ranks)
    assert first["fetched"] == first["all"]
    assert second["fetched"] == 0
    assert first["own"] == second["own"] == list(range(64))
    assert first["is_right"] and second["is_right"]


def test_the_first_rank_has_the_word(ranks: list[dict[str, Any]]) -> None:
    assert [rank["said"] for rank in ranks] == [[5, 7], [5, 7]]


def test_alone_every_call_is_what_plain_torch_does(
    new_model: Callable[[], PreTrainedModel],
) -> None:
    model = new_model()
    assert shard(model, model, SingleRank()) is model
    whole = gather(model.state_dict(keep_vars=True), SingleRank())
    assert whole.keys() == model.state_dict().keys()
    assert not any(tensor.requires_grad for tensor in whole.values())
    weight = model.get_parameter("lm_head.weight")
    assert torch.equal(shard_like(whole["lm_head.weight"], weight), weight)
    twin = new_model()
    for one in (model, twin):
        one(input_ids=torch.arange(12)[None], use_cache=False).logits.square().sum().backward()
    norm = clip(model.parameters(), 0.5)
    assert norm == float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad)


def test_tied_weights_stay_one_when_they_are_gathered() -> None:
    tied = torch.nn.Parameter(torch.ones(3))
    whole = gather({"one": tied, "between": torch.zeros(1), "other": tied}, SingleRank())
    assert list(whole) == ["one", "between", "other"]
    assert whole["one"] is whole["other"]


@pytest.mark.slow
def test_a_gang_whose_rank_was_killed_ends_with_the_same_bits(
    tmp_path: Path, model_folder: Path
) -> None:
    """Two lives under the supervisor, against one that nobody killed."""
    last = f"step.{MORTAL_STEPS - 1}.safetensors"
    for name in ("killed", "whole"):
        shutil.copytree(model_folder, tmp_path / name / "model")
    (tmp_path / "killed" / "kill").touch()
    lives = supervised("mortal", 2, tmp_path / "killed")
    assert [rank["began_at"] for rank in lives] == [3, 3]
    forked("mortal", 2, tmp_path / "whole")
    assert (tmp_path / "killed" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()
