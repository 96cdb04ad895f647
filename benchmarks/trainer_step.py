# SPDX-License-Identifier: Apache-2.0
"""Our training step against a bare PyTorch loop on the same packed batch of SmolLM2-135M.

Both begin with the same weights and take the same batch in turns; ours also plans its updates,
builds its tensors and keeps its statistics. The bare side is handed finished tensors."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.baselines.train_loop import Packed, TrainLoop
from benchmarks.cache import smollm2
from benchmarks.harness import MIN_PAIRS, log_line, result
from penstock.trainer.actor import Actor
from penstock.trainer.attention import make_attention_layout
from penstock.trainer.batches import Batch, Roles
from penstock.trainer.compute import ComputeSpec
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.inputs import make_inputs, split
from penstock.trainer.learner import Learner, Optimizer
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.model_folders import load_model
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.ranks.sharding import shard
from penstock.trainer.samples import Samples
from penstock.trainer.schedules import Schedule
from penstock.trainer.updates import UpdateSpec, plan_updates

Ints = npt.NDArray[np.int64]

RATE = 1e-6
MICRO_BATCH_TOKENS = 1024
PROMPT = 32
"""Tokens of each sample that are not trained."""
QUICK_PAIRS = 3


def long_tailed(num: int, mean: int, draw: np.random.Generator) -> Ints:
    """Lengths of answers: log-normal with σ = 1, from 8 tokens to 16 times the mean."""
    lengths = np.exp(draw.normal(np.log(mean) - 0.5, 1.0, num)).astype(np.int64)
    return np.clip(lengths, 8, 16 * mean)


def make_batch(lengths: Ints, vocab_size: int, draw: np.random.Generator) -> Batch:
    """Samples of random tokens, in groups of 8."""
    ends = np.cumsum(lengths + PROMPT)
    starts = ends - lengths - PROMPT
    num_tokens = int(ends[-1])
    position = np.arange(num_tokens) - np.repeat(starts, lengths + PROMPT)
    samples = Samples(
        starts_S=starts,
        ends_S=ends,
        rows_S=np.arange(lengths.size),
        ids_T=draw.integers(0, vocab_size, num_tokens).astype(np.int32),
        mask_T=position >= PROMPT,
        logprobs_T=draw.normal(-10.8, 0.1, num_tokens).astype(np.float32),
        versions_T=np.zeros(num_tokens, np.int32),
        turns_T=np.zeros(num_tokens, np.int32),
        roles_T=np.zeros(num_tokens, np.int32),
        rewards_T=np.full(num_tokens, np.nan),
        agents_T=np.zeros(num_tokens, np.int32),
        spawners_T=np.zeros(num_tokens, np.int32),
        sampled_T=np.maximum(position - PROMPT, 0),
        temperature_T=np.ones(num_tokens, np.float32),
        top_k_T=np.zeros(num_tokens, np.int32),
        top_p_T=np.ones(num_tokens, np.float32),
        min_p_T=np.zeros(num_tokens, np.float32),
        experts_T=np.zeros((num_tokens, 0), np.uint8),
    )
    advantages = draw.normal(0, 1, lengths.size)
    return Batch(
        seq=1,
        trains_from=0,
        samples=samples,
        groups_R=np.arange(lengths.size) // 8,
        staleness_R=np.zeros(lengths.size, np.int64),
        costs_R=np.ones(lengths.size),  # one rank, which computes them all
        row_columns={"reward": draw.random(lengths.size)},
        token_columns={"advantage": np.repeat(advantages, lengths + PROMPT)},
        longest_R=lengths,
        roles=Roles.unnamed(lengths.size),
    )


def packed(batch: Batch) -> list[Packed]:
    """The very micro-batches that our side makes, as plain tensors."""
    [update] = plan_updates(batch, UpdateSpec(), SingleRank())
    parts: list[Packed] = []
    for chosen in split(update.samples, batch.samples, MICRO_BATCH_TOKENS):
        one = make_inputs(batch, chosen, update.weights_T)
        streams = (one.sampling_K, one.advantages_K, one.weights_K)
        tensors = (one.ids_P, one.positions_P, one.predictor_K, one.targets_K)
        parts.append(Packed(*tensors, *(stream.float() for stream in streams)))
    return parts


def our_side(folder: Path, precision: torch.dtype) -> Learner:
    actor = Actor(load_model(folder))
    compute = ComputeSpec(precision=precision)
    return Learner(
        shard(actor, actor.model, SingleRank(), compute=compute),
        ClippedLoss(),
        Optimizer(schedule=Schedule(peak=RATE)),
        update_spec=UpdateSpec(),
        forward_pass=ForwardPass(ranks=SingleRank(), micro_batch_tokens=MICRO_BATCH_TOKENS),
    )


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """Of the median, 95 %, by drawing again."""
    draw = np.random.default_rng(0)
    again = draw.choice(np.array(ratios), (2000, len(ratios)))
    low, high = np.quantile(np.median(again, axis=1), [0.025, 0.975])
    return float(low), float(high)


def padding(draw: np.random.Generator) -> tuple[float, float]:
    """Share of computed places that hold no token: in the line, and in attention's rows."""
    lengths = long_tailed(512, 256, draw) + PROMPT
    cells = sum(run.numel() for run in make_attention_layout(lengths).buckets)
    line = make_attention_layout(lengths).unbucket_P.numel()
    return 1 - int(lengths.sum()) / line, 1 - int(lengths.sum()) / cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few tokens; at most 3 minutes")
    parser.add_argument("--pairs", type=int, help=f"{MIN_PAIRS}, or {QUICK_PAIRS} with --quick")
    quick, pairs = (words := parser.parse_args()).quick, words.pairs
    pairs = pairs or (QUICK_PAIRS if quick else MIN_PAIRS)
    folder = smollm2(quick=quick)
    precision = torch.bfloat16
    draw = np.random.default_rng(0)
    lengths = long_tailed(8, 48 if quick else 256, draw)
    ours, bare = our_side(folder, precision), TrainLoop(folder, RATE)
    batch = make_batch(lengths, ours.vocab_size, draw)
    parts = packed(batch)
    log_line(f"{lengths.sum()} trained tokens in {len(parts)} micro-batches of at most 1,024")
    norm_ratio = ours.step(batch).values["grad_norm"] / bare.step(parts, precision)
    ratios: list[float] = []
    for pair in range(pairs):
        ours_s = seconds(partial(ours.step, batch))
        bare_s = seconds(partial(bare.step, parts, precision))
        ratios.append(bare_s / ours_s)
        log_line(f"pair {pair + 1} of {pairs}: ours {ours_s:.2f} s, bare {bare_s:.2f} s")
    low, high = interval(ratios)
    line, attention = padding(draw)
    result(
        benchmark="trainer_step",
        ratio=round(median(ratios), 3),
        ratio_low=round(low, 3),
        ratio_high=round(high, 3),
        pairs=pairs,
        trained_tokens=int(lengths.sum()),
        norm_ratio=round(norm_ratio, 4),
        padding_waste=round(line, 4),
        padding_waste_attention=round(attention, 4),
    )


if __name__ == "__main__":
    main()
