# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_meshes.py` do, and what one process does in their place."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.unit.trainer import rank_jobs
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, Sealed, make_turn, seal, settings
from tests.unit.trainer.test_packing_check import SMALL
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from penstock.config import LoraConfig
from penstock.config.stages import ParallelConfig
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.build import build_models
from penstock.trainer.lora import init_adapter
from penstock.trainer.models import Models
from penstock.trainer.ranks.group import Ranks, make_rank_group
from penstock.trainer.state_shards import copy_shard, open_state, state_names, write_shard

NUM_STEPS = 20
FEW_STEPS = 4
LORA = {"rank": 2, "alpha": 8}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {}),
    "one_head": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "four_heads": ("qwen3", {"num_key_value_heads": 4}),
    "moe": ("qwen3_moe", MOE),
}
"""By key-value heads: what context parallelism exchanges, and what goes round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model on one mesh."""

    kind: str
    parallel: ParallelConfig
    steps: int = NUM_STEPS
    is_adapted: bool = False
    algorithm: str = "grpo"

    @property
    def base(self) -> tuple[str, int, bool, str]:
        """What one process trains for the comparison."""
        return self.kind, self.steps, self.is_adapted, self.algorithm


P = ParallelConfig
TWO = {
    "cp2": Job(kind="dense", parallel=P(cp=2)),
    "cp2 ring": Job(kind="one_head", parallel=P(cp=2), steps=FEW_STEPS),
    "tp2": Job(kind="dense", parallel=P(tp=2), steps=FEW_STEPS),
    "tp2 lora": Job(kind="dense", parallel=P(tp=2), steps=FEW_STEPS, is_adapted=True),
    "cp2 lora": Job(kind="dense", parallel=P(cp=2), steps=FEW_STEPS, is_adapted=True),
    "cp2 critic": Job(kind="dense", parallel=P(cp=2), steps=FEW_STEPS, algorithm="ppo"),
    "replicas2": Job(kind="dense", parallel=P(dp=2, replicas=2), steps=FEW_STEPS),
}
FOUR = {
    "cp4 heads and ring": Job(kind="dense", parallel=P(cp=4)),
    "cp4 heads": Job(kind="four_heads", parallel=P(cp=4), steps=FEW_STEPS),
    "cp4 ring": Job(kind="one_head", parallel=P(cp=4), steps=FEW_STEPS),
    "cp4 moe": Job(kind="moe", parallel=P(cp=4)),
    "dp2 cp2": Job(kind="dense", parallel=P(dp=2, cp=2), steps=FEW_STEPS),
    "cp2 tp2": Job(kind="dense", parallel=P(cp=2, tp=2), steps=FEW_STEPS),
    "cp2 tp2 lora": Job(kind="dense", parallel=P(cp=2, tp=2), steps=FEW_STEPS, is_adapted=True),
    "dp4 replicas2": Job(kind="dense", parallel=P(dp=4, replicas=2), steps=FEW_STEPS),
    "dp2 replicas2 tp2": Job(kind="dense", parallel=P(dp=2, replicas=2, tp=2), steps=FEW_STEPS),
    "dp2 replicas2 cp2": Job(kind="moe", parallel=P(dp=2, replicas=2, cp=2), steps=FEW_STEPS),
    "dp2 tp2 critic": Job(kind="dense", parallel=P(dp=2, tp=2), steps=FEW_STEPS, algorithm="ppo"),
    "dp4 replicas2 lora": Job(
        kind="dense", parallel=P(dp=4, replicas=2), steps=FEW_STEPS, is_adapted=True
    ),
    "dp4 ep2": Job(kind="moe", parallel=P(dp=4, ep=2), steps=FEW_STEPS),
    "dp4 ep4": Job(kind="moe", parallel=P(dp=4, ep=4), steps=FEW_STEPS),
    "dp4 ep2 lora": Job(kind="moe", parallel=P(dp=4, ep=2), steps=FEW_STEPS, is_adapted=True),
    "dp4 ep2 critic": Job(kind="moe", parallel=P(dp=4, ep=2), steps=FEW_STEPS, algorithm="ppo"),
}
EIGHT = {
    "dp2 replicas2 cp2 tp2": Job(
        kind="dense", parallel=P(dp=2, replicas=2, cp=2, tp=2), steps=FEW_STEPS
    ),
}
JOBS = {2: TWO, 4: FOUR, 8: EIGHT}


def write_models(folder: Path) -> None:
    """With weights large enough that attention matters."""
    for name, (kind, more) in KINDS.items():
        torch.manual_seed(0)
        values = {**SMALL, "initializer_range": 0.3, **more}
        config = cast(Any, CONFIG_MAPPING[kind])(**values)
        made: Any = cast(Any, AutoModelForCausalLM).from_config(config)
        for target in (name, f"{name}+lora"):
            made.float().save_pretrained(folder / target)
        init_adapter(folder / f"{name}+lora", LoraConfig.model_validate(LORA), seed=0)


def sealed_batch(seq: int) -> Sealed:
    """Samples of very different lengths: some are cut several times, some not."""
    draw = np.random.default_rng([7, seq])
    groups: list[Any] = []
    for _ in range(4):
        prompt = draw.integers(3, 14, draw.integers(1, 9)).tolist()
        members: list[Any] = []
        for _ in range(2):
            sampled = draw.integers(0, VOCAB_SIZE, draw.integers(1, 60)).tolist()
            logprobs = (-2.77 + 0.3 * draw.standard_normal(len(sampled))).tolist()
            turn = make_turn(prompt, sampled, logprobs=logprobs, number=seq - 1)
            members.append((turn, float(draw.random())))
        groups.append(members)
    return seal(groups, seq=seq, trains_from=seq - 1)


def batch(seq: int, ranks: Ranks) -> Batch:
    sealed, position = sealed_batch(seq), ranks.position
    rows = [
        row if index % position.parallel.dp == position.part else replace(row, payload=None)
        for index, row in enumerate(sealed.rows)
    ]
    return assemble(sealed.manifest, rows, POLICY, VOCAB_SIZE, ranks=ranks)


def build(folder: Path, job: Job, ranks: Ranks, weights: Path | None = None) -> Models:
    lora = LORA if job.is_adapted else None
    config = settings(
        folder / job.kind,
        job.algorithm,
        lora=lora,
        learning_rate=1e-3,
        minibatches=1,
        micro_batch_tokens=200,
    )
    initial = folder / f"{job.kind}{'+lora' if lora else ''}"
    return build_models(config, POLICY, weights or initial, ranks)


def train(folder: Path, name: str, job: Job, ranks: Ranks) -> list[tuple[float, float]]:
    """Loss and norm of the gradient by step; the weights are written as NAME.safetensors."""
    models = build(folder, job, ranks)
    curve = [_step(models, seq, ranks) for seq in range(1, job.steps + 1)]
    weights = models.gather_weights()
    if ranks.position.is_rank0:
        save_file(
            {key: one.contiguous() for key, one in weights.items()}, folder / f"{name}.safetensors"
        )
    return curve


def _step(models: Models, seq: int, ranks: Ranks) -> tuple[float, float]:
    values = models.step(batch(seq, ranks)).values
    return values["loss"], values["grad_norm"]


# --- jobs -----------------------------------------------------------------------------------------


def meshes(folder: Path) -> dict[str, Any]:
    """Every job of this many ranks; then a state that goes from mesh to mesh."""
    found: dict[str, Any] = {}
    for name, job in JOBS[dist.get_world_size()].items():
        ranks = make_rank_group(job.parallel)
        assert ranks is not None
        found[name] = train(folder, name, job, ranks)
    return {"curves": found, "resumed": _resumed(folder) if dist.get_world_size() == 4 else []}


RESUMED = (P(dp=2, cp=2), P(dp=4, replicas=2), P(cp=2, tp=2), P(cp=4))
"""Meshes of one run, one after another."""
EACH = 2
"""Steps on each."""


def _resumed(folder: Path) -> list[tuple[float, float]]:
    """A run whose mesh changes: each continues from the files of the one before."""
    curve: list[tuple[float, float]] = []
    before: Path | None = None
    for index, parallel in enumerate(RESUMED):
        ranks = make_rank_group(parallel)
        assert ranks is not None
        models = build(folder, Job(kind="dense", parallel=parallel), ranks, before)
        if before is not None:
            models.restore(open_state([before / "state" / name for name in state_names(4)]))
        first = 1 + EACH * index
        curve += [_step(models, seq, ranks) for seq in range(first, first + EACH)]
        after = folder / f"after {index}"
        weights = models.gather_weights()
        if ranks.position.is_rank0:
            shutil.copytree(folder / "dense", after)
            save_file(weights, after / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()
        write_shard(after / "state", dist.get_rank(), 4, copy_shard(models.state_tensors()))
        dist.barrier()
        before = after
    return curve


if __name__ == "__main__":
    rank_jobs.JOBS.update(meshes=meshes)
    rank_jobs.main()
