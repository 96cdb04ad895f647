# SPDX-License-Identifier: Apache-2.0
"""What the GPU tests train, each in a separate process: `python -m … JOB FOLDER`.

A job trains the model in FOLDER/model on this process's device and writes what it saw as JSON. As a
rank it joins the others first. Without a GPU it computes on the CPU, which tests the job itself."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from tests.unit.trainer.doubles import POLICY, random_batch, settings
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from penstock.config import RunConfig
from penstock.fleet.processes import exit_with_parent
from penstock.trainer.batches import assemble
from penstock.trainer.build import build_models
from penstock.trainer.device import select_device
from penstock.trainer.pipeline.builtin import chain_of
from penstock.trainer.ranks.group import Ranks
from penstock.trainer.ranks.supervisor import RankEnv, read_rank_env
from penstock.trainer.service import joined_ranks

NUM_STEPS = 3
MATMULS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
LARGE = SMALL | {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
"""About 0.27 billion parameters."""


def write_model(folder: Path, sizes: Mapping[str, int]) -> Path:
    """A random Qwen3, the same on every machine."""
    torch.manual_seed(0)
    config = cast(Any, CONFIG_MAPPING["qwen3"])(**sizes)
    model = cast(Any, AutoModelForCausalLM).from_config(config).float()
    model.save_pretrained(folder / "model")
    return folder


class MatmulDtypes(TorchDispatchMode):
    """Counts the matrix products by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func._schema.name.removeprefix("aten::") in MATMULS:
            factor = next(arg for arg in reversed(args) if isinstance(arg, torch.Tensor))
            name = str(factor.dtype).removeprefix("torch.")
            self.seen[name] = self.seen.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def job_config(folder: Path, job: str, num_ranks: int) -> RunConfig:
    """`train` is in float32, for comparisons; `bf16` is what one trains with on GPUs."""
    precision = "bfloat16" if job == "bf16" else "float32"
    parallel = {"dp": num_ranks}
    return settings(folder / "model", "grpo", precision=precision, parallel=parallel)


def train(folder: Path, job: str, rank_env: RankEnv | None) -> dict[str, Any]:
    """Losses and gradient norms of each step, dtypes of matrix products, memory."""
    config = job_config(folder, job, rank_env.num_ranks if rank_env else 1)
    device = select_device(rank_env.local_rank if rank_env else 0)
    with joined_ranks(config, POLICY, rank_env, device) as ranks:
        return train_on(config, folder, ranks, device)


def train_on(config: RunConfig, folder: Path, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    models = build_models(config, POLICY, folder / "model", ranks, device)
    position = ranks.position
    curve: list[tuple[float, float]] = []
    with MatmulDtypes() as dtypes:
        for seq in range(1, NUM_STEPS + 1):
            sealed = random_batch(3, seq=seq, num_groups=8, size=4)
            rows = [
                row if index % position.parallel.dp == position.part else replace(row, payload=None)
                for index, row in enumerate(sealed.rows)
            ]
            batch = assemble(sealed.manifest, rows, POLICY, models.vocab_size, ranks=ranks)
            values = models.step(batch).values
            curve.append((values["loss"], values["grad_norm"]))
    is_cuda = device.type == "cuda"
    return {
        "curve": curve,
        "matmuls": dtypes.seen,
        "device": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "uuid": str(torch.cuda.get_device_properties(device).uuid) if is_cuda else "",
        "peak_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else 0,
        "predicted_bytes": chain_of(config, POLICY).memory.total_bytes,
    }


def main() -> None:
    exit_with_parent()
    job, folder = sys.argv[1], Path(sys.argv[2])
    rank_env = read_rank_env(os.environ)
    seen = train(folder, job, rank_env)
    rank = rank_env.rank if rank_env else 0
    (folder / f"{job}.{rank}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # torch takes seconds to end


if __name__ == "__main__":
    main()
