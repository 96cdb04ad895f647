# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_compute_ranks.py` do, and what one process does in their place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from tests.unit.trainer import rank_jobs
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, random_batch, settings
from tests.unit.trainer.test_packing_check import SMALL
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from penstock.config.stages import ParallelConfig
from penstock.trainer.actor import Actor
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.build import build_models
from penstock.trainer.compute import ComputeSpec
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.model_folders import load_model
from penstock.trainer.models import Models
from penstock.trainer.ranks.group import Ranks, make_rank_group
from penstock.trainer.ranks.regions import local
from penstock.trainer.ranks.sharding import gather, shard

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {"dense": ("qwen3", {}), "moe": ("qwen3_moe", MOE)}
KEYS: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32+layer": {"recompute": "layer"},
    "float32+offload": {"offload": "optimizer"},
    "bfloat16": {"precision": "bfloat16"},
    "bfloat16+layer": {"precision": "bfloat16", "recompute": "layer"},
    "bfloat16+selective": {"precision": "bfloat16", "recompute": "selective"},
}
"""Settings to train with, by name."""
NAMES = {"dense": tuple(KEYS), "moe": ("float32", "bfloat16", "bfloat16+layer")}
"""Of the settings that ranks train with."""
NUM_STEPS = 2
ATTENTION = "_scaled_dot_product"
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
COLLECTIVES = ("_allgather_base_", "_reduce_scatter_base_")


def write_models(folder: Path) -> None:
    """As they are initialized: a flat distribution, in which rounding shows little."""
    for name, (kind, more) in KINDS.items():
        torch.manual_seed(0)
        config = cast(Any, CONFIG_MAPPING[kind])(**SMALL, **more)
        cast(Any, AutoModelForCausalLM).from_config(config).float().save_pretrained(folder / name)


def batch(seq: int, ranks: Ranks) -> Batch:
    sealed, position = random_batch(3, seq=seq, num_groups=5, size=3), ranks.position
    rows = [
        row if index % position.parallel.dp == position.part else replace(row, payload=None)
        for index, row in enumerate(sealed.rows)
    ]
    return assemble(sealed.manifest, rows, POLICY, VOCAB_SIZE, ranks=ranks)


def build(folder: Path, kind: str, name: str, ranks: Ranks, algorithm: str = "grpo") -> Models:
    training: dict[str, Any] = {"minibatches": 1, "micro_batch_tokens": 64, **KEYS[name]}
    config = settings(folder / kind, algorithm, learning_rate=1e-4, **training)
    return build_models(config, POLICY, folder / kind, ranks)


class Operations(TorchDispatchMode):
    """Notes the operands of every matmul, attention and collective that is computed meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: dict[str, set[str]] = {}
        self.float32_widths: set[int] = set()
        """Smallest dimension of each matmul in float32."""
        self.num_matmuls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        is_matmul = name in MATMULS or name.startswith(ATTENTION)
        if is_matmul or name in COLLECTIVES:
            self.num_matmuls += is_matmul
            found = {str(one.dtype).removeprefix("torch.") for one in args[:2]}
            self.dtypes.setdefault(name, set()).update(found)
            if name in MATMULS and found == {"float32"}:
                self.float32_widths.add(min(size for one in args[:2] for size in one.shape))
        return func(*args, **(kwargs or {}))


def train(folder: Path, kind: str, name: str, ranks: Ranks) -> dict[str, Any]:
    """Train with these settings; the first gradient, a tenth of which is AdamW's first moment, is
    written as NAME.safetensors."""
    models, held = build(folder, kind, name, ranks), Held()
    operations, curve = Operations(), list[tuple[float, float]]()
    handle = register_optimizer_step_pre_hook(held.note)
    for seq in range(1, NUM_STEPS + 1):
        with operations if seq == 1 else nullcontext():
            values = models.step(batch(seq, ranks)).values
        curve.append((values["loss"], values["grad_norm"]))
        if seq == 1:
            state = gather(models.state_tensors(), ranks)
            moments = {key: value for key, value in state.items() if key.endswith(".exp_avg")}
            path = folder / f"{kind}.{name}.{ranks.position.parallel.num_ranks}.safetensors"
            if ranks.position.is_rank0:
                save_file(moments, path)
    handle.remove()
    state = {key: value for key, value in models.state_tensors().items() if ".exp_" in key}
    return {
        "curve": curve,
        "dtypes": {name: sorted(found) for name, found in operations.dtypes.items()},
        "num_matmuls": operations.num_matmuls,
        "share": {**held.share, "moments": _share(state.values())},
        "held_dtypes": sorted(held.dtypes | {str(value.dtype) for value in state.values()}),
    }


class Held:
    """What the optimizer has when it is called: this rank's share of it, of 1, and its types."""

    def __init__(self) -> None:
        self.share: dict[str, float] = {}
        self.dtypes: set[str] = set()

    def note(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        weights = [one for group in optimizer.param_groups for one in group["params"]]
        gradients = [one.grad for one in weights if one.grad is not None]
        self.share = {"weights": _share(weights), "gradients": _share(gradients)}
        self.dtypes |= {str(one.dtype) for one in (*weights, *gradients)}


def _share(tensors: Any) -> float:
    found: list[Tensor] = list(tensors)
    return sum(local(one).numel() for one in found) / sum(one.numel() for one in found)


def ranks_of(folder: Path) -> dict[str, Any]:
    """All ranks of the world, in parts."""
    ranks = make_rank_group(ParallelConfig(dp=torch.distributed.get_world_size()))
    assert ranks is not None
    found: dict[str, Any] = {"share_after_inference": share_after_inference(folder, ranks)}
    for kind, names in NAMES.items():
        found[kind] = {name: train(folder, kind, name, ranks) for name in names}
    return found


def share_after_inference(folder: Path, ranks: Ranks) -> float:
    """Of a model's weights, what this rank still has when a pass without a backward pass ended."""
    actor = Actor(load_model(folder / "dense"))
    shard(actor, actor.model, ranks, compute=ComputeSpec(precision=torch.bfloat16))
    ForwardPass(ranks=ranks).infer(actor, batch(1, ranks))
    return _share(actor.parameters())


if __name__ == "__main__":
    rank_jobs.JOBS.update(ranks_of=ranks_of)
    rank_jobs.main()
