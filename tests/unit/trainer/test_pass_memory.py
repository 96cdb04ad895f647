# SPDX-License-Identifier: Apache-2.0
"""The predicted peak of a rank against what fake ranks allocate and what real ones take."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.real_shapes import QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B, Shape, meta_model
from benchmarks.size import Case, measure
from tests.unit.trainer.memory_jobs import NUM_TOKENS, PARALLEL, SHAPE
from tests.unit.trainer.rank_jobs import forked

from penstock.config.stages import ParallelConfig
from penstock.trainer import actor
from penstock.trainer.pipeline.memory_estimate import estimate
from penstock.trainer.pipeline.pass_memory import (
    MAX_LOGITS,
    ModelShape,
    PassSpec,
    pass_memory,
)

NUM_LAYERS = 3
"""From here on a layer's weights are gathered while another one's gradients are reduced."""
SMALL = Shape(
    name="small",
    num_layers=NUM_LAYERS,
    sizes={
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    vocab_size=8192,
)
SMALL_MOE = replace(
    SMALL,
    family="qwen3_moe",
    sizes={
        **SMALL.sizes,
        "moe_intermediate_size": 256,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
)
SMALL_LLAMA = replace(SMALL, family="llama")
BF16, FP32 = torch.bfloat16, torch.float32


def case(shape: Shape, recompute: Any = "layer", precision: torch.dtype = BF16) -> Case:
    return Case(
        shape=shape,
        num_tokens=2048,
        parallel=ParallelConfig(dp=8),
        num_layers=NUM_LAYERS,
        recompute=recompute,
        precision=precision,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    shape: ModelShape
    num_parameters: int

    @classmethod
    def of(cls, shape: Shape, num_layers: int) -> Model:
        found = ModelShape.read(shape.config(num_layers))
        assert found is not None
        count = sum(parameter.numel() for parameter in meta_model(shape, num_layers).parameters())
        return cls(shape=found, num_parameters=count)

    def peak_bytes(self, spec: PassSpec) -> int:
        num_pieces = spec.parallel.num_shards * spec.parallel.tp
        own = estimate(self.num_parameters, is_trained=True).per_rank(num_pieces)
        return own.total_bytes + pass_memory(self.shape, self.num_parameters, spec).total_bytes


def predicted(one: Case) -> int:
    spec = PassSpec(
        parallel=one.parallel,
        num_tokens=one.num_tokens,
        precision="bfloat16" if one.precision is BF16 else "float32",
        recompute=one.recompute,
        is_on_gpu=True,
    )
    return Model.of(one.shape, one.layers).peak_bytes(spec)


def test_the_prediction_is_what_fake_ranks_allocate() -> None:
    one = case(SMALL)
    assert predicted(one) == pytest.approx(measure(one).peak_bytes, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "recompute", "precision"),
    [
        *itertools.product((SMALL, SMALL_LLAMA), ("none", "layer", "selective"), (BF16, FP32)),
        *itertools.product((SMALL_MOE,), ("none", "layer", "selective"), (BF16,)),
    ],
    ids=lambda value: value.family if isinstance(value, Shape) else str(value),
)
def test_the_prediction_holds_for_every_setting(
    shape: Shape, recompute: Any, precision: torch.dtype
) -> None:
    for dp, num_tokens in ((2, 512), (64, 8192)):
        one = replace(
            case(shape, recompute, precision),
            parallel=ParallelConfig(dp=dp),
            num_tokens=num_tokens,
        )
        assert predicted(one) == pytest.approx(measure(one).peak_bytes, rel=0.1), one


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "parallel", "num_tokens", "recompute"),
    [
        (SMALL_MOE, ParallelConfig(dp=8, ep=2), 2048, "layer"),
        (SMALL_MOE, ParallelConfig(dp=8, ep=8), 2048, "none"),
        (QWEN3_30B_A3B, ParallelConfig(dp=64, ep=8), 4096, "layer"),
        (QWEN3_30B_A3B, ParallelConfig(dp=64, ep=8), 32768, "layer"),
    ],
)
def test_the_prediction_holds_with_experts_spread(
    shape: Shape, parallel: ParallelConfig, num_tokens: int, recompute: Any
) -> None:
    one = replace(case(shape, recompute), parallel=parallel, num_tokens=num_tokens)
    assert predicted(one) == pytest.approx(measure(one).peak_bytes, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [QWEN3_8B, QWEN3_32B, QWEN3_30B_A3B], ids=lambda one: one.name)
@pytest.mark.parametrize("num_tokens", [4096, 32768])
@pytest.mark.parametrize("dp", [8, 64])
def test_the_prediction_holds_at_real_widths(shape: Shape, num_tokens: int, dp: int) -> None:
    one = replace(case(shape), parallel=ParallelConfig(dp=dp), num_tokens=num_tokens)
    assert predicted(one) == pytest.approx(measure(one).peak_bytes, rel=0.1)


MESHES = [
    ParallelConfig(dp=4, cp=2),
    ParallelConfig(dp=2, cp=8),
    ParallelConfig(dp=8, replicas=4),
    ParallelConfig(tp=2),
    ParallelConfig(dp=4, tp=2),
    ParallelConfig(dp=2, cp=2, tp=2),
]
"""Of the small shape, which has two key-value heads; with cp 8, keys go round."""
REAL_MESHES = [
    ParallelConfig(tp=8),
    ParallelConfig(dp=8, tp=8),
    ParallelConfig(dp=8, cp=8),
    ParallelConfig(dp=64, replicas=8),
]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", MESHES, ids=lambda one: one.text)
def test_the_prediction_holds_for_every_mesh(parallel: ParallelConfig) -> None:
    for num_tokens in (512, 8192):
        one = replace(case(SMALL), parallel=parallel, num_tokens=num_tokens)
        assert predicted(one) == pytest.approx(measure(one).peak_bytes, rel=0.1), one


@pytest.mark.slow
@pytest.mark.parametrize("parallel", REAL_MESHES, ids=lambda one: one.text)
@pytest.mark.parametrize("num_tokens", [4096, 32768])
def test_the_prediction_holds_for_meshes_at_real_widths(
    parallel: ParallelConfig, num_tokens: int
) -> None:
    one = replace(case(QWEN3_8B), parallel=parallel, num_tokens=num_tokens)
    assert predicted(one) == pytest.approx(measure(one).peak_bytes, rel=0.1)


def test_residuals_are_shared_by_tensor_parallel_ranks() -> None:
    """What one more layer keeps of a token is a rank's share of its input, and no more."""
    plain = replace(case(SMALL), parallel=ParallelConfig(dp=2, tp=2), num_tokens=1024)
    few, more = (measure(replace(plain, num_layers=n)).saved_bytes for n in (3, 5))
    width = BF16.itemsize * SMALL.sizes["hidden_size"]
    assert (more - few) / 2 / 1024 == pytest.approx(width / 2, rel=0.05)


def test_replicas_exchange_gradients_and_gather_among_their_own_shards() -> None:
    flat, hybrid = (
        measure(replace(case(SMALL), parallel=ParallelConfig(dp=8, replicas=n), num_tokens=512))
        for n in (1, 4)
    )
    assert hybrid.state_bytes == pytest.approx(4 * flat.state_bytes, rel=0.01)
    reduced = [name for name in hybrid.num_collectives if name.startswith("allreduce")]
    assert sum(hybrid.num_collectives[name] for name in reduced) == NUM_LAYERS + 1
    assert not [name for name in flat.num_collectives if name.startswith("allreduce")]


def test_recomputing_takes_less_and_more_tokens_take_more() -> None:
    model, spec = Model.of(SMALL, 8), PassSpec(parallel=ParallelConfig(dp=2), num_tokens=8192)
    peaks = {
        recompute: model.peak_bytes(replace(spec, recompute=recompute))
        for recompute in ("layer", "selective", "none")
    }
    assert peaks["layer"] < peaks["selective"] < peaks["none"]
    assert model.peak_bytes(spec) > model.peak_bytes(replace(spec, num_tokens=4096))
    wider = replace(spec, parallel=ParallelConfig(dp=4))
    assert model.peak_bytes(wider) < model.peak_bytes(spec)


def test_the_largest_chunk_of_logits_is_the_actors() -> None:
    assert MAX_LOGITS == actor.MAX_LOGITS


def test_a_config_of_another_kind_has_no_shape() -> None:
    assert ModelShape.read({"model_type": "whisper"}) is None
    assert ModelShape.read({**SMALL.config(2), "hidden_size": None}) is None


@pytest.mark.slow
def test_two_real_ranks_take_what_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this setting freed blocks go back to the system at once; without it a process took about
    half as much again, most likely blocks that glibc kept."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    spec = PassSpec(parallel=PARALLEL, num_tokens=NUM_TOKENS)
    expected = Model.of(SHAPE, SHAPE.num_layers).peak_bytes(spec)
    for rank in forked("peak_of", 2, tmp_path, "tests.unit.trainer.memory_jobs"):
        assert rank["skipped"] == [None, None], "nothing was trained"
        assert expected == pytest.approx(rank["rise_bytes"], rel=0.15)
