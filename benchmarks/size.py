# SPDX-License-Identifier: Apache-2.0
"""What one rank needs at real size: 8B, 32B and a mixture of experts on 8 and 64 fake ranks.

The trainer's own actor, sharding, forward pass and loss run one micro-batch of one sample and one
update at full depth, on tensors without content (`fake_ranks`). Slopes per token and per layer come
from runs of 1 and 3 layers. Peaks are of rank 0, which has the largest shard of each tensor, and
include one more gathered layer: CUDA gathers the next layer while one computes, a fake rank does
not. What kernels take for themselves and what an allocator wastes is not seen; hence 72 of 80 GB.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fake_ranks import (
    BACKWARD,
    UPDATE,
    Device,
    Ledger,
    MemoryLedger,
    fake_process_group,
)
from benchmarks.harness import log_line, result
from benchmarks.real_shapes import QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B, Shape, meta_model
from benchmarks.trainer_step import PROMPT, make_batch
from penstock.config.stages import ParallelConfig
from penstock.config.trainer import Recompute
from penstock.trainer.actor import Actor
from penstock.trainer.batches import Batch
from penstock.trainer.compute import ComputeSpec, decoder_layers
from penstock.trainer.device import CPU
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.learner import weighted_sum
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.ranks.group import SingleRank, make_rank_group
from penstock.trainer.ranks.sharding import shard

GB = 1e9
LIMIT_GB = 72.0
MAX_UNSHARDED_GB = 0.1
LONG, SHORT = 32768, 4096
SLOPE_TOKENS = 4096
BEFORE_COMMIT = "170a7984"
BEFORE: Mapping[str, float] = {
    "peak_gb_8b": 351.1,
    "peak_gb_32b": 1024.5,
    "peak_gb_moe": 0.0,
    "unsharded_gb": 62.4,
}
"""The same cases at that commit, by this measure: autocast without recomputation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model on one mesh with one length of sample."""

    shape: Shape
    num_tokens: int
    parallel: ParallelConfig
    num_layers: int | None = None
    """None: all of the shape's."""
    recompute: Recompute = "layer"
    precision: torch.dtype = torch.bfloat16
    device: Device = field(default_factory=Device)

    @property
    def layers(self) -> int:
        return self.num_layers or self.shape.num_layers

    @property
    def mesh(self) -> str:
        return f"dp {self.parallel.dp} x tp {self.parallel.tp}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Of one rank."""

    state_bytes: int
    """Its shard of weights and AdamW's state."""
    saved_bytes: int
    """Made in the forward pass and alive at its end."""
    peaks: Mapping[str, float]
    """By phase."""
    work: Ledger

    @property
    def peak_bytes(self) -> float:
        return max(self.peaks.values())


def one_sample(num_tokens: int, vocab_size: int) -> Batch:
    """A batch of one sample, of which all but the prompt is trained."""
    draw = np.random.default_rng(0)
    return make_batch(np.array([num_tokens + 1 - PROMPT]), vocab_size, draw)


def measure(case: Case) -> Measure:
    """One micro-batch and one update of rank 0, with AdamW's state from an update before."""
    with fake_process_group(case.parallel.num_ranks):
        model = meta_model(case.shape, case.layers)
        layer_bytes = case.precision.itemsize * sum(
            parameter.numel() for parameter in decoder_layers(model)[0].parameters()
        )
        ranks = make_rank_group(case.parallel)
        assert ranks is not None
        compute = ComputeSpec(precision=case.precision, recompute=case.recompute)
        actor = shard(Actor(model), model, ranks, CPU, compute)
        with FakeTensorMode(allow_non_fake_inputs=True), MemoryLedger(case.device) as ledger:
            actor.to_empty(device="cpu")
            batch = one_sample(case.num_tokens, case.shape.vocab_size)
            found = _step(actor, ledger, batch, layer_bytes // case.parallel.tp)
        del actor, model
    gc.collect()
    return found


def _step(actor: Actor, ledger: MemoryLedger, batch: Batch, layer_bytes: int) -> Measure:
    optimizer = _optimizer_with_state(actor)
    ledger.restart()
    work = ledger.ledger
    state_bytes = work.live_bytes
    [(inputs, tokens)] = ForwardPass(ranks=SingleRank()).run(actor, batch, np.arange(1))
    saved_bytes = work.live_bytes - state_bytes
    work.phase = BACKWARD
    weighted_sum(ClippedLoss()(tokens), inputs).backward()
    del inputs, tokens
    work.phase = UPDATE
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    peaks = {phase: float(peak + layer_bytes) for phase, peak in work.peaks.items()}
    return Measure(state_bytes=state_bytes, saved_bytes=saved_bytes, peaks=peaks, work=work)


def _optimizer_with_state(actor: Actor) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(actor.parameters(), fused=True)
    for parameter in actor.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """What one more layer keeps from its forward to its backward pass."""

    bytes_per_token: float
    unsharded_bytes: float
    """Whatever the length of the sample: gathered weights that outlive their layer."""


def slopes(case: Case) -> Slopes:
    """From 1 and 3 layers with half and all of the tokens."""
    lengths = (case.num_tokens // 2, case.num_tokens)
    per_layer = [(_saved(case, 3, length) - _saved(case, 1, length)) / 2 for length in lengths]
    by_token = (per_layer[1] - per_layer[0]) / (lengths[1] - lengths[0])
    return Slopes(bytes_per_token=by_token, unsharded_bytes=per_layer[0] - by_token * lengths[0])


def _saved(case: Case, num_layers: int, num_tokens: int) -> int:
    return measure(replace(case, num_layers=num_layers, num_tokens=num_tokens)).saved_bytes


QUICK = (
    Case(shape=QWEN3_8B, num_tokens=LONG, parallel=ParallelConfig(dp=8)),
    Case(shape=QWEN3_32B, num_tokens=LONG, parallel=ParallelConfig(dp=64)),
    Case(shape=QWEN3_30B_A3B, num_tokens=LONG, parallel=ParallelConfig(dp=64)),
)
"""The promises."""


def grid() -> Iterator[Case]:
    """Every shape, mesh and length, the promises first."""
    yield from QUICK
    for first, dp, num_tokens in itertools.product(QUICK, (8, 64), (SHORT, LONG)):
        case = replace(first, parallel=ParallelConfig(dp=dp), num_tokens=num_tokens)
        if case not in QUICK:
            yield case


def describe(case: Case, found: Measure, per_layer: Slopes) -> Iterator[str]:
    """Of one case, for people."""
    work, device = found.work, case.device
    update_s = found.state_bytes * 2 / device.hbm_tb_s / 1e12
    bound_s = max(work.compute_s, work.wire_s) + update_s
    fits = "fits" if found.peak_bytes <= LIMIT_GB * GB else "does NOT fit"
    yield (
        f"{case.shape.name}, {case.layers} layers, {case.mesh}, {case.num_tokens:,} tokens, "
        f"recompute {case.recompute}: peak {found.peak_bytes / GB:.1f} GB, {fits} in "
        f"{LIMIT_GB:g} GB"
    )
    yield "  peaks: " + ", ".join(f"{name} {size / GB:.1f}" for name, size in found.peaks.items())
    yield (
        f"  shard with AdamW's state {found.state_bytes / GB:.2f} GB, saved for the backward pass "
        f"{found.saved_bytes / GB:.2f} GB: {per_layer.bytes_per_token / 1e3:.1f} kB a token and "
        f"layer, {per_layer.unsharded_bytes / 1e6:.1f} MB of gathered weights a layer"
    )
    for name, size in work.wire_bytes.items():
        yield f"  {work.num_collectives[name]} x {name}: {size / GB:.2f} GB sent"
    yield f"  products: {dict(work.matmuls)}"
    yield (
        f"  at best {bound_s:.2f} s a micro-batch and update: compute {work.compute_s:.2f} s, "
        f"links {work.wire_s:.2f} s, AdamW {update_s:.2f} s"
    )


def run(cases: Sequence[Case]) -> dict[str, float]:
    """The figures of the promises; prints each case as it is done."""
    figures, slopes_of = dict[str, float](), dict[str, Slopes]()
    for index, case in enumerate(cases):
        started = time.perf_counter()
        name = case.shape.name
        if name not in slopes_of:
            slopes_of[name] = slopes(replace(case, num_tokens=SLOPE_TOKENS))
        found = measure(case)
        for line in describe(case, found, slopes_of[name]):
            log_line(line)
        log_line(f"  measured in {time.perf_counter() - started:.0f} s")
        if index < len(QUICK):
            figures[f"peak_gb_{name}"] = round(found.peak_bytes / GB, 1)
            unsharded_gb = slopes_of[name].unsharded_bytes * case.layers / GB
            figures["unsharded_gb"] = max(figures.get("unsharded_gb", 0.0), round(unsharded_gb, 3))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the three promises, no grid")
    parser.add_argument("--recompute", choices=["none", "layer", "selective"], default="layer")
    for name, kind, help in (
        ("tflops", float, "bf16 products of a device"),
        ("hbm-tb-s", float, "its memory's bandwidth"),
        ("host-link-gb-s", float, "between devices of a host"),
        ("network-gb-s", float, "between hosts, for each device"),
    ):
        default = getattr(Device(), name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{help} ({default:g})")
    words = parser.parse_args()
    torch.set_num_threads(1)
    device = Device(
        tflops=words.tflops,
        hbm_tb_s=words.hbm_tb_s,
        host_link_gb_s=words.host_link_gb_s,
        network_gb_s=words.network_gb_s,
    )
    chosen = [
        replace(case, recompute=words.recompute, device=device)
        for case in (QUICK if words.quick else grid())
    ]
    figures = run(chosen)
    result(
        benchmark="size",
        **figures,
        **{f"{name}_before": value for name, value in BEFORE.items()},
        before=BEFORE_COMMIT,
        mesh="; ".join(f"{c.shape.name}: {c.mesh}, {c.num_tokens} tokens" for c in QUICK),
        limit_gb=LIMIT_GB,
        met=int(
            all(
                v <= (MAX_UNSHARDED_GB if k == "unsharded_gb" else LIMIT_GB)
                for k, v in figures.items()
            )
        ),
    )


if __name__ == "__main__":
    main()
