# SPDX-License-Identifier: Apache-2.0
"""Precision and recomputation of a model that is not sharded; `ranks/test_compute_ranks.py` has the
rest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.compute_jobs import KINDS, Operations, batch, build, train, write_models
from tests.unit.trainer.doubles import settings
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from penstock.trainer import actor as actors
from penstock.trainer.actor import Actor
from penstock.trainer.attention import causal_attention, make_attention_layout, repeats_heads
from penstock.trainer.build import compute_spec
from penstock.trainer.compute import (
    ComputeSpec,
    decoder_layers,
    use_precision,
    use_recomputation,
)
from penstock.trainer.critic import Critic
from penstock.trainer.inputs import Inputs
from penstock.trainer.model_folders import load_model
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.ranks.sharding import shard

BFLOAT16 = ComputeSpec(precision=torch.bfloat16)
ALONE = SingleRank()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compute")
    write_models(folder)
    return folder


def line(num_tokens: int) -> Inputs:
    """One sample of which every token is trained."""
    ids_P, zeros_K = torch.arange(num_tokens) % 7, torch.zeros(num_tokens)
    return Inputs(
        ids_P=ids_P,
        positions_P=torch.arange(num_tokens),
        rows=make_attention_layout(np.array([num_tokens])),
        token_K=torch.arange(num_tokens),
        predictor_K=torch.arange(num_tokens),
        targets_K=ids_P,
        sampling_K=zeros_K,
        advantages_K=zeros_K,
        sequences_K=torch.zeros(num_tokens, dtype=torch.long),
        weights_K=torch.ones(num_tokens),
        staleness_K=torch.zeros(num_tokens, dtype=torch.long),
        temperature_K=None,
        kept=None,
        extra_columns={},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_recomputation_changes_no_bit_of_an_update(work: Path, kind: str) -> None:
    names = ("bfloat16", "bfloat16+layer", "bfloat16+selective")
    plain, layer, selective = (train(work, kind, name, ALONE) for name in names)
    assert layer["curve"] == plain["curve"] == selective["curve"]
    assert layer["num_matmuls"] > plain["num_matmuls"] == selective["num_matmuls"]
    files = [(work / f"{kind}.{name}.1.safetensors").read_bytes() for name in names]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_matmul_is_in_bfloat16_except_those_that_are_listed(work: Path, kind: str) -> None:
    """Actor, critic and reference; the critic's head is listed, and its width is 1."""
    models = build(work, kind, "bfloat16", ALONE, "ppo")
    with Operations() as found:
        models.step(batch(1, ALONE))
    heads = found.dtypes.pop("addmm"), found.dtypes.pop("mm")
    assert heads == ({"float32"}, {"bfloat16", "float32"})
    assert {dtype for dtypes in found.dtypes.values() for dtype in dtypes} == {"bfloat16"}
    assert found.float32_widths == {1}


class Copies(TorchDispatchMode):
    """The storages of copies in half precision of matrices of these sizes."""

    def __init__(self, sizes: set[torch.Size]) -> None:
        super().__init__()
        self._sizes = sizes
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_copy = func is torch.ops.aten._to_copy.default and result.dtype is torch.bfloat16
        if is_copy and result.shape in self._sizes:
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result


@pytest.mark.parametrize("recompute", ["none", "layer", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_copy_of_a_weight_outlives_its_layers_pass(
    work: Path, kind: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "MAX_LOGITS", 128)  # four tokens at a time, recomputed
    actor = Actor(load_model(work / kind))
    compute = ComputeSpec(precision=torch.bfloat16, recompute=recompute)
    shard(actor, actor.model, ALONE, compute=compute)
    matrices = [weight for weight in actor.parameters() if weight.ndim > 1]
    with Copies({weight.shape for weight in matrices}) as copies:
        tokens = actor(line(9))
        assert len(copies.made) > len(decoder_layers(actor.model)) * 7
        assert all(copy.expired() for copy in copies.made)
        tokens.logprobs_K.sum().backward()
    assert all(copy.expired() for copy in copies.made)
    assert {weight.dtype for weight in actor.parameters()} == {torch.float32}
    gradients = [weight.grad for weight in actor.parameters()]
    assert all(one is not None and one.dtype is torch.float32 for one in gradients)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_is_that_of_the_model_in_bfloat16(work: Path, kind: str) -> None:
    """As an engine computes it: norms, routers and all."""
    mixed, whole = Actor(load_model(work / kind)), Actor(load_model(work / kind, torch.bfloat16))
    shard(mixed, mixed.model, ALONE, compute=BFLOAT16)
    inputs = line(9)
    with torch.no_grad():
        assert torch.equal(mixed(inputs).logprobs_K, whole(inputs).logprobs_K)


def test_frozen_models_are_kept_in_the_precision_of_passes(work: Path) -> None:
    loaded: list[tuple[torch.dtype, torch.dtype]] = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(work / "dense", dtype)
        [table] = {one.dtype for name, one in model.named_buffers() if name.endswith("inv_freq")}
        loaded.append((model.dtype, table))
    assert loaded == [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)]


def test_the_pass_through_a_model_in_float32_is_left_as_it_is(work: Path) -> None:
    actor = Actor(load_model(work / "dense"))
    shard(actor, actor.model, ALONE, compute=ComputeSpec())
    assert not any("forward" in vars(module) for module in actor.modules())


def test_layers_are_recomputed_on_gpus_unless_the_file_says_otherwise(work: Path) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    unset = settings(work / "dense", "grpo").training
    assert compute_spec(unset, cuda).recompute == "layer"
    assert compute_spec(unset, cpu).recompute == "none"
    chosen = settings(work / "dense", "grpo", recompute="none").training
    assert compute_spec(chosen, cuda).recompute == "none"


class Sizes(TorchDispatchMode):
    """The largest number of long dimensions that a tensor had."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor):
                self.most = max(self.most, sum(size >= self._length for size in one.shape))
        return result


def _long_model() -> PreTrainedModel:
    config = Qwen3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_attention_makes_no_number_for_each_pair_of_tokens(recompute: Any) -> None:
    compute = ComputeSpec(precision=torch.bfloat16, recompute=recompute)
    with FakeTensorMode(allow_non_fake_inputs=True):
        actor = Actor(_long_model())
        use_precision(actor, actor.model, compute)
        use_recomputation(actor.model, recompute)
        with Sizes(4096) as found:
            actor(line(4096)).logprobs_K.sum().backward()
    assert found.most == 1


class _Query:
    """What is asked of a query on a GPU, which no test here has."""

    is_cuda = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def test_keys_are_repeated_only_where_a_gpus_flash_attention_cannot_share_them() -> None:
    half, full = (_Query(dtype) for dtype in (torch.bfloat16, torch.float32))
    asked: Any = [(half, False), (half, True), (full, False), (full, True)]
    assert [repeats_heads(q, has_mask=mask) for q, mask in asked] == [False, True, True, True]
    assert not repeats_heads(torch.zeros(1), has_mask=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_a_gpu_takes_memory_by_token(dtype: torch.dtype, window: int | None) -> None:
    """A number for each pair of tokens, or of each window, and head would be gigabytes."""
    length = 16_384
    q, k, v = (
        torch.randn(1, heads, length, 64, device="cuda", dtype=dtype, requires_grad=True)
        for heads in (8, 2, 2)
    )
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    causal_attention(q, k, v, 0.125, window).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 1e9


def test_a_critics_head_stays_in_float32(work: Path) -> None:
    critic = Critic(load_model(work / "dense"))
    shard(critic, critic.model, ALONE, compute=BFLOAT16)
    nn.init.constant_(critic.head.bias, 100.3)
    with torch.no_grad():
        assert critic.scores(critic(line(5))).tolist() == pytest.approx([100.3] * 5, rel=1e-6)
