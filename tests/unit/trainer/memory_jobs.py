# SPDX-License-Identifier: Apache-2.0
"""What the ranks of `test_pass_memory.py` do: two real steps, with the peak of their memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.real_shapes import Shape, meta_model
from benchmarks.trainer_step import PROMPT, make_batch
from tests.unit.trainer import rank_jobs

from penstock.config.stages import ParallelConfig
from penstock.trainer.actor import Actor
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.learner import Learner, Optimizer, SkipReason
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.ranks.group import RankGroup, make_rank_group
from penstock.trainer.ranks.regions import local
from penstock.trainer.ranks.sharding import shard
from penstock.trainer.schedules import Schedule
from penstock.trainer.updates import UpdateSpec

NUM_TOKENS = 128
SHAPE = Shape(
    name="0.1b",
    num_layers=12,
    sizes={
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
    vocab_size=32000,
)
PARALLEL = ParallelConfig(dp=2)


def _kilobytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [found] = [line for line in lines if line.startswith(f"{key}:")]
    return int(found.split()[1])


def peak_of(folder: Path) -> dict[str, Any]:
    """Bytes by which two steps, of two micro-batches each, raise the peak of this process. A step
    of a small model comes first: torch loads much of its code when it is first called."""
    torch.set_num_threads(1)
    ranks = make_rank_group(PARALLEL)
    assert ranks is not None
    _steps(replace(SHAPE, vocab_size=64, num_layers=1), ranks)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew, at what is resident
    before_kb = _kilobytes("VmRSS")
    skipped = _steps(SHAPE, ranks)
    return {"rise_bytes": 1024 * (_kilobytes("VmHWM") - before_kb), "skipped": skipped}


def _steps(shape: Shape, ranks: RankGroup) -> list[SkipReason | None]:
    model = meta_model(shape, shape.num_layers)
    actor = shard(Actor(model), model, ranks)
    actor.to_empty(device="cpu")
    for parameter in actor.parameters():
        torch.nn.init.normal_(local(parameter), std=0.02)
    for buffer in actor.buffers():
        buffer.fill_(0.5)
    learner = Learner(
        actor,
        ClippedLoss(),
        Optimizer(schedule=Schedule(peak=1e-6)),
        update_spec=UpdateSpec(),
        forward_pass=ForwardPass(ranks=ranks, micro_batch_tokens=NUM_TOKENS),
    )
    draw = np.random.default_rng(ranks.position.rank)
    batch = make_batch(np.array([NUM_TOKENS + 1 - PROMPT] * 2), shape.vocab_size, draw)
    return [learner.step(batch).skipped for _ in range(2)]


if __name__ == "__main__":
    rank_jobs.JOBS.update(peak_of=peak_of)
    rank_jobs.main()
