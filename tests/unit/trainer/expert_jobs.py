# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_experts.py` do: a mixture of experts with all experts on every rank, and
with half of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from tests.unit.trainer import rank_jobs
from tests.unit.trainer.compute_jobs import KEYS, Operations, batch
from tests.unit.trainer.doubles import POLICY, settings

from penstock.config.stages import ParallelConfig
from penstock.trainer import state_shards
from penstock.trainer.build import build_models
from penstock.trainer.models import Models
from penstock.trainer.ranks.experts import expert_modules
from penstock.trainer.ranks.group import RankGroup, make_rank_group
from penstock.trainer.ranks.regions import local
from penstock.trainer.weight_shares import ShareBuffers, write_share, write_share_of_rank

NUM_STEPS, BETWEEN = 20, 10
"""A checkpoint is taken after step BETWEEN."""
MESHES = {"dp2": ParallelConfig(dp=2), "dp2ep2": ParallelConfig(dp=2, ep=2)}


def build(folder: Path, name: str, ranks: RankGroup) -> Models:
    training: dict[str, Any] = {"minibatches": 1, "micro_batch_tokens": 64, **KEYS[name]}
    config = settings(folder, "grpo", learning_rate=1e-3, **training)
    return build_models(config, POLICY, folder, ranks)


def train(models: Models, ranks: RankGroup, steps: range) -> list[tuple[float, float]]:
    values = [models.step(batch(seq, ranks)).values for seq in steps]
    return [(found["loss"], found["grad_norm"]) for found in values]


def save(models: Models, ranks: RankGroup, model: Path, folder: Path) -> None:
    """Weights and state as the ranks of a trainer write them, each its own share."""
    rank, num_ranks = ranks.position.rank, ranks.position.parallel.num_ranks
    share = ShareBuffers().copy(models.weights(), is_rank0=ranks.position.is_rank0)
    path = folder / "model.safetensors"
    if ranks.position.is_rank0:
        folder.mkdir()
        shutil.copy(model / "config.json", folder)
        write_share(path, share, num_ranks=num_ranks)
    else:
        write_share_of_rank(path, share, rank=rank, is_cancelled=lambda: False)
    state_shards.write_shard(
        folder, rank, num_ranks, state_shards.copy_shard(models.state_tensors())
    )
    dist.barrier()


def resume(folder: Path, ranks: RankGroup) -> list[tuple[float, float]]:
    models = build(folder, "float32", ranks)
    names = state_shards.state_names(2)
    models.restore(state_shards.open_state([folder / name for name in names]))
    return train(models, ranks, range(BETWEEN + 1, NUM_STEPS + 1))


def spread(folder: Path) -> dict[str, Any]:
    """Two ranks: a straight life in each mesh, and one that goes on from the other's checkpoint."""
    groups = {name: make_rank_group(parallel) for name, parallel in MESHES.items()}
    found: dict[str, Any] = {"curve": {}, "resumed": {}, "share": {}, "is_written": {}}
    for name, ranks in groups.items():
        assert ranks is not None
        models = build(folder / "moe", "float32", ranks)
        found["curve"][name] = train(models, ranks, range(1, BETWEEN + 1))
        save(models, ranks, folder / "moe", folder / name)
        gathered = models.gather_weights()
        if ranks.position.is_rank0:
            stored = load_file(folder / name / "model.safetensors")
            found["is_written"][name] = stored.keys() == gathered.keys() and all(
                stored[key].equal(tensor) for key, tensor in gathered.items()
            )
        found["curve"][name] += train(models, ranks, range(BETWEEN + 1, NUM_STEPS + 1))
        found["share"][name] = expert_share(models)
        gathered = models.gather_weights()
        if ranks.position.is_rank0:
            save_file(gathered, folder / f"{name}.end.safetensors")
    for name, other in (("dp2", "dp2ep2"), ("dp2ep2", "dp2")):
        ranks = groups[other]
        assert ranks is not None
        found["resumed"][f"{name} to {other}"] = resume(folder / name, ranks)
    found["operations"] = {
        key: operations(folder, key, groups["dp2ep2"]) for key in ("bfloat16", "bfloat16+layer")
    }
    return found


def expert_share(models: Models) -> float:
    held = [one for module in expert_modules(models.model) for one in module.parameters()]
    return sum(local(one).numel() for one in held) / sum(one.numel() for one in held)


def operations(folder: Path, key: str, ranks: RankGroup | None) -> dict[str, Any]:
    assert ranks is not None
    models, counted = build(folder / "moe", key, ranks), Operations()
    with counted:
        curve = train(models, ranks, range(1, 2))
    return {"curve": curve, "dtypes": {k: sorted(v) for k, v in counted.dtypes.items()}}


if __name__ == "__main__":
    rank_jobs.JOBS.update(spread=spread)
    rank_jobs.main()
