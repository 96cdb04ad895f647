# SPDX-License-Identifier: Apache-2.0
"""Plans of meshes: what divides a model, what does not, and an 8B with an adapter on one GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmarks.real_shapes import QWEN3_8B, QWEN3_30B_A3B, Shape, meta_model

from penstock.config import RunConfig
from penstock.config.stages import ParallelConfig
from penstock.errors import ConfigError
from penstock.trainer.pipeline.builtin import plan_of
from penstock.trainer.pipeline.mesh_check import mesh_problems
from penstock.trainer.pipeline.pass_memory import ModelShape

GB = 10**9


def problems(shape: Shape, parallel: ParallelConfig, **more: Any) -> list[str]:
    found = ModelShape.read({**shape.config(2), **more})
    assert found is not None
    return list(mesh_problems(found, parallel))


@pytest.mark.parametrize(
    ("parallel", "more", "why"),
    [
        (ParallelConfig(tp=3), {}, "tp 3 cannot cut 32 attention heads evenly: 2 left over"),
        (ParallelConfig(tp=16), {}, "tp 16 cannot cut 8 key-value heads evenly: 8 left over"),
        (ParallelConfig(tp=2), {"vocab_size": 151}, "151 tokens of the vocabulary evenly: 1 left"),
        (
            ParallelConfig(cp=16),
            {"sliding_window": 4096},
            "cp 16 does not divide the 8 key-value heads of a rank",
        ),
        (
            ParallelConfig(cp=4, tp=4),
            {"sliding_window": 4096},
            "cp 4 does not divide the 2 key-value heads of a rank",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused_with_the_figure(
    parallel: ParallelConfig, more: dict[str, Any], why: str
) -> None:
    [found] = problems(QWEN3_8B, parallel, **more)
    assert why in found


def test_experts_are_not_cut_by_tensor_parallelism() -> None:
    [found] = problems(QWEN3_30B_A3B, ParallelConfig(tp=2))
    assert "128 experts; set tp to 1" in found


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(tp=8),
        ParallelConfig(cp=16),
        ParallelConfig(dp=4, replicas=4, cp=3),
        ParallelConfig(cp=8, tp=8),
    ],
    ids=lambda one: one.text,
)
def test_a_mesh_that_divides_is_not(parallel: ParallelConfig) -> None:
    assert problems(QWEN3_8B, parallel) == []
    window = {"sliding_window": 4096, "use_sliding_window": False}
    assert problems(QWEN3_8B, parallel, **window) == []


def model_folder(folder: Path, shape: Shape) -> Path:
    """With the headers of its files, and no weights."""
    model = meta_model(shape, shape.num_layers)
    header = {
        name: {"dtype": "BF16", "shape": list(one.shape), "data_offsets": [0, 0]}
        for name, one in model.named_parameters()
    }
    content = json.dumps(header).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(content).to_bytes(8, "little") + content)
    (folder / "config.json").write_text(json.dumps(shape.config(shape.num_layers)))
    return folder


def planned(init: Path, parallel: dict[str, int], lora: dict[str, int] | None, devices: int) -> Any:
    config = RunConfig.model_validate(
        {
            "name": "planned",
            "hosts": {"gpu0": {"devices": devices, "memory_gb": 80, "tags": ["train"]}},
            "models": {"policy": {"init": str(init), "lora": lora}},
            "sources": [{"name": "train", "task": "penstock.tasks.reverse"}],
            "algorithm": {"name": "grpo"},
            "training": {
                "steps": 1,
                "parallel": parallel,
                "precision": "bfloat16",
                "recompute": "layer",
                "micro_batch_tokens": 8192,
            },
        }
    )
    [chain] = plan_of(config, has_gpus=True).chains
    return chain


def test_an_8b_with_an_adapter_fits_one_gpu_and_without_one_does_not(tmp_path: Path) -> None:
    init = model_folder(tmp_path / "8b", QWEN3_8B)
    chain = planned(init, {}, {"rank": 16, "alpha": 32}, devices=1)
    assert 30 * GB < chain.memory.total_bytes < 72 * GB
    assert chain.hosts == ("gpu0:0",)
    with pytest.raises(ConfigError, match="short"):
        planned(init, {}, None, devices=1)
    with pytest.raises(ConfigError, match="tp 16 cannot cut 8 key-value heads evenly"):
        planned(init, {"tp": 16}, None, devices=16)


def test_replicas_take_the_memory_of_a_copy_each(tmp_path: Path) -> None:
    init = model_folder(tmp_path / "8b", QWEN3_8B)
    one, two = (
        planned(init, {"dp": 8, "replicas": replicas}, None, devices=8).memory
        for replicas in (1, 2)
    )
    assert two.weights_bytes == pytest.approx(2 * one.weights_bytes, rel=1e-6)
    assert two.optimizer_bytes == pytest.approx(2 * one.optimizer_bytes, rel=1e-6)
    assert two.activation_bytes == one.activation_bytes
