# SPDX-License-Identifier: Apache-2.0
"""What one rank needs at real size: 8B, 32B and a mixture of experts on 8 and 64 fake ranks.

The trainer's own actor, sharding, forward pass and loss run one micro-batch of one sample and one
update, on tensors without content (`fake_ranks`). `--quick` runs 3 and 5 layers and extrapolates
each phase of a step by its slope; the full run also has every layer of every case. Peaks are of
rank 0, which has the largest shard of each tensor, and include one more gathered layer: CUDA
gathers the next layer while one computes, a fake rank does not. What kernels take for themselves
and what an allocator wastes is not seen; hence 72 of 80 GB.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from benchmarks.fake_ranks import (
    BACKWARD,
    UPDATE,
    Device,
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
from penstock.trainer.ranks import experts
from penstock.trainer.ranks.experts import expert_modules
from penstock.trainer.ranks.group import SingleRank, make_rank_group
from penstock.trainer.ranks.sharding import shard

GB = 1e9
LIMIT_GB = 72.0
MAX_UNSHARDED_GB = 0.1
LONG, SHORT = 32768, 4096
BEFORE_COMMIT = "170a7984"
BEFORE: Mapping[str, float] = {
    "peak_gb_8b": 355.2,
    "peak_gb_32b": 1026.6,
    "peak_gb_moe": 607.5,
    "unsharded_gb": 62.4,
}
"""The same cases at that commit by this measure, with autocast and without recomputation; the
mixture of experts from 1 and 3 layers, its products in float32. Gathered weights are of the 32B."""


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
        return self.parallel.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Of one rank."""

    state_bytes: float
    """Its shard of weights, gradients and AdamW's state."""
    saved_bytes: float
    """Made in the forward pass and alive at its end."""
    peaks: Mapping[str, float]
    """By phase."""
    wire_bytes: Mapping[str, float]
    """Sent, by collective and type."""
    num_collectives: Mapping[str, float]
    matmuls: Mapping[str, float]
    """By operation and type."""
    compute_s: float
    wire_s: float

    @property
    def peak_bytes(self) -> float:
        return max(self.peaks.values())


def one_sample(num_tokens: int, vocab_size: int) -> Batch:
    """A batch of one sample, of which all but the prompt is trained."""
    draw = np.random.default_rng(0)
    return make_batch(np.array([num_tokens + 1 - PROMPT]), vocab_size, draw)


def measure(case: Case) -> Measure:
    """The second micro-batch of an update of rank 0, and the update: gradients and AdamW's state
    are there already."""
    with fake_process_group(case.parallel.num_ranks):
        model = meta_model(case.shape, case.layers)
        layer_bytes = case.precision.itemsize * _layer_parameters(model, case.parallel.ep)
        ranks = make_rank_group(case.parallel)
        assert ranks is not None
        compute = ComputeSpec(precision=case.precision, recompute=case.recompute)
        actor = shard(Actor(model), model, ranks, CPU, compute)
        with (
            _visits_are_even(),
            FakeTensorMode(allow_non_fake_inputs=True),
            MemoryLedger(case.device) as ledger,
        ):
            actor.to_empty(device="cpu")
            batch = one_sample(case.num_tokens, case.shape.vocab_size)
            found = _step(actor, ledger, batch, layer_bytes // case.parallel.tp)
        del actor, model
    gc.collect()
    return found


def _layer_parameters(model: PreTrainedModel, ep: int) -> int:
    """Of one layer as it is gathered: a rank of `ep` gathers its own experts only."""
    layer = decoder_layers(model)[0]
    in_experts = sum(one.numel() for found in expert_modules(layer) for one in found.parameters())
    return sum(one.numel() for one in layer.parameters()) - in_experts + in_experts // ep


@contextmanager
def _visits_are_even() -> Generator[None]:
    """Tensors without content choose no experts: every rank gets as many visits as it sends."""
    counted = experts.count_visits

    def even(experts_V: Tensor, num_experts: int, group: dist.ProcessGroup) -> experts.Visits:
        ep, num_visits = group.size(), experts_V.numel()
        each = [num_visits * (at + 1) // ep - num_visits * at // ep for at in range(ep)]
        return experts.Visits(sent=each, received=each, experts_G=experts_V % (num_experts // ep))

    experts.count_visits = even
    try:
        yield
    finally:
        experts.count_visits = counted


def _step(actor: Actor, ledger: MemoryLedger, batch: Batch, layer_bytes: int) -> Measure:
    optimizer = _optimizer_with_state(actor)
    ledger.restart()
    work = ledger.ledger
    state_bytes = work.live_bytes
    [(inputs, tokens)] = ForwardPass(ranks=SingleRank()).run(actor, batch, np.arange(1))
    saved_bytes = work.live_bytes - state_bytes
    work.phase = BACKWARD
    loss: Any = weighted_sum(ClippedLoss()(tokens), inputs)
    loss.backward()
    del inputs, tokens, loss
    work.phase = UPDATE
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    peaks = {phase: float(peak + layer_bytes) for phase, peak in work.peaks.items()}
    return Measure(
        state_bytes=state_bytes,
        saved_bytes=saved_bytes,
        peaks=peaks,
        wire_bytes=dict(work.wire_bytes),
        num_collectives=dict(work.num_collectives),
        matmuls=dict(work.matmuls),
        compute_s=work.compute_s,
        wire_s=work.wire_s,
    )


def _optimizer_with_state(actor: Actor) -> Any:
    optimizer: Any = torch.optim.AdamW(actor.parameters(), fused=True)
    for parameter in actor.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return optimizer


FEW, MORE = 3, 5
"""Layers of the two runs from which deeper models are extrapolated."""


def extrapolate(case: Case) -> tuple[Measure, Measure]:
    """(the measure at full depth, what one more layer adds), from runs of a few layers: within each
    phase everything is linear in the number of layers, and the full run of this benchmark shows
    it."""
    few, more = (measure(replace(case, num_layers=n)) for n in (FEW, MORE))
    per_layer = _combine(more, few, lambda a, b: (a - b) / (MORE - FEW))
    return _combine(few, per_layer, lambda a, b: a + b * (case.layers - FEW)), per_layer


def _combine(a: Measure, b: Measure, function: Callable[[float, float], float]) -> Measure:
    def counters(one: Mapping[str, float], two: Mapping[str, float]) -> dict[str, float]:
        return {name: function(value, two.get(name, 0)) for name, value in one.items()}

    return Measure(
        state_bytes=function(a.state_bytes, b.state_bytes),
        saved_bytes=function(a.saved_bytes, b.saved_bytes),
        peaks=counters(a.peaks, b.peaks),
        wire_bytes=counters(a.wire_bytes, b.wire_bytes),
        num_collectives=counters(a.num_collectives, b.num_collectives),
        matmuls=counters(a.matmuls, b.matmuls),
        compute_s=function(a.compute_s, b.compute_s),
        wire_s=function(a.wire_s, b.wire_s),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slopes:
    """What one more layer keeps from its forward to its backward pass."""

    bytes_per_token: float
    unsharded_bytes: float
    """Whatever the length of the sample: gathered weights that outlive their layer."""


def slopes(case: Case, saved_bytes: float) -> Slopes:
    """saved_bytes: what one more layer saves of this case's tokens; a short sample has the rest."""
    short = extrapolate(replace(case, num_tokens=SHORT))[1].saved_bytes
    by_token = (saved_bytes - short) / (case.num_tokens - SHORT)
    return Slopes(bytes_per_token=by_token, unsharded_bytes=short - by_token * SHORT)


QUICK = (
    Case(shape=QWEN3_8B, num_tokens=LONG, parallel=ParallelConfig(dp=8)),
    Case(shape=QWEN3_32B, num_tokens=LONG, parallel=ParallelConfig(dp=64)),
    Case(shape=QWEN3_30B_A3B, num_tokens=LONG, parallel=ParallelConfig(dp=64)),
)
"""The promises."""


def grid() -> Iterator[Case]:
    """Every shape, mesh and length."""
    for case, dp, num_tokens in itertools.product(QUICK, (8, 64), (SHORT, LONG)):
        yield replace(case, parallel=ParallelConfig(dp=dp), num_tokens=num_tokens)
        if case.shape is QWEN3_30B_A3B:
            yield replace(case, parallel=ParallelConfig(dp=dp, ep=8), num_tokens=num_tokens)


def describe(case: Case, found: Measure) -> Iterator[str]:
    """Of one case, for people."""
    update_s = found.state_bytes * 2 / case.device.hbm_tb_s / 1e12
    bound_s = max(found.compute_s, found.wire_s) + update_s
    fits = "fits" if found.peak_bytes <= LIMIT_GB * GB else "does NOT fit"
    yield (
        f"{case.shape.name}, {case.layers} layers, {case.mesh}, {case.num_tokens:,} tokens, "
        f"recompute {case.recompute}: peak {found.peak_bytes / GB:.1f} GB, {fits} in "
        f"{LIMIT_GB:g} GB"
    )
    yield "  peaks: " + ", ".join(f"{name} {size / GB:.1f}" for name, size in found.peaks.items())
    yield (
        f"  shard of weights, gradients and AdamW's state {found.state_bytes / GB:.2f} GB, saved "
        f"for the backward pass {found.saved_bytes / GB:.2f} GB"
    )
    for name, size in found.wire_bytes.items():
        yield f"  {found.num_collectives[name]:.0f} x {name}: {size / GB:.2f} GB sent"
    yield "  products: " + ", ".join(f"{n:.0f} x {name}" for name, n in found.matmuls.items())
    yield (
        f"  at best {bound_s:.2f} s a micro-batch and update: compute {found.compute_s:.2f} s, "
        f"links {found.wire_s:.2f} s, AdamW {update_s:.2f} s"
    )


def promises(cases: Sequence[Case]) -> dict[str, float]:
    """The figures of the three cases; prints each as it is done."""
    figures = {"unsharded_gb": 0.0}
    for case in cases:
        started = time.perf_counter()
        found, per_layer = extrapolate(case)
        kept = slopes(case, per_layer.saved_bytes)
        for line in describe(case, found):
            log_line(line)
        log_line(
            f"  {kept.bytes_per_token / 1e3:.1f} kB a token and layer and "
            f"{kept.unsharded_bytes / 1e6:.1f} MB of gathered weights a layer are kept; from "
            f"{FEW} and {MORE} layers, in {time.perf_counter() - started:.0f} s"
        )
        figures[f"peak_gb_{case.shape.name}"] = round(found.peak_bytes / GB, 1)
        unsharded_gb = round(kept.unsharded_bytes * case.layers / GB, 3)
        figures["unsharded_gb"] = max(figures["unsharded_gb"], unsharded_gb)
    return figures


def full_depth(cases: Sequence[Case]) -> None:
    """The rest of the grid, with every layer: no extrapolation."""
    for case in cases:
        for line in describe(case, measure(case)):
            log_line(line)


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
    settings: dict[str, Any] = {"recompute": words.recompute, "device": device}
    figures = promises([replace(case, **settings) for case in QUICK])
    if not words.quick:
        full_depth([replace(case, **settings) for case in grid()])
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
