# SPDX-License-Identifier: Apache-2.0
"""The price of staleness: versions that the demo needs until its answers earn 0.5 and 0.9, if each
batch was sampled by the newest version and when by the one before, under several corrections.

The demo's own task, model, batch and rates; learner and sampler share a process. A batch is trained
by one update, so a loss is a factor on each token's gradient, as a function of its ratio ρ of the
weights trained from to the ones that sampled:

    clip       ρ, and 0 where ρ left [0.8, 1.2] in the direction of its advantage; at most 3
    wide       the same with [0.5, 2]
    decoupled  ρ, at most 5
    truncated  ρ, at most 2
    proximal   1: the staleness is ignored
    m2po       ρ, and 0 for the worst tokens until the mean of log² ρ is 0.04

A version's reward is measured on the answers that train a later one: 1,024 each, at no cost."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import log_line, result, scratch
from benchmarks.lagged_training import ActorCritic, Sampler, State, copy_weights
from penstock.config import demo_config
from penstock.trainer.actor import Actor
from penstock.trainer.algorithms.decoupled import DecoupledLoss
from penstock.trainer.algorithms.m2po import M2poBudget
from penstock.trainer.build_objective import WrappedBudget
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.learner import Learner, Optimizer
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.divergence import EntropyBonus
from penstock.trainer.losses.ratios import RatioAgainst
from penstock.trainer.losses.tokens import BudgetedObjective, Objective
from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.schedules import Schedule, Shape
from penstock.trainer.updates import UpdateSpec

DELTA = 3.0
LOSSES: Mapping[str, Callable[[], Objective]] = {
    "clip": lambda: ClippedLoss(delta=DELTA),
    "wide": lambda: ClippedLoss(epsilon=0.5, epsilon_high=1.0, delta=DELTA),
    "decoupled": DecoupledLoss,
    "truncated": lambda: DecoupledLoss(max_weight=2.0),
    "proximal": lambda: ClippedLoss(ratio_against=RatioAgainst.PROXIMAL),
}
NEEDS_PROXIMAL = {"decoupled", "truncated", "proximal"}
ARMS: Sequence[tuple[str, int]] = (
    ("clip", 0),
    *((name, 1) for name in (*LOSSES, "m2po")),
)
"""Loss and lag; on fresh data all losses but m2po are the same."""
DEMO = "wide"
"""The loss of the demo's config."""
TARGETS = (0.5, 0.9)
T_95 = {1: math.inf, 2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Student's t, two-sided 95 %, by number of seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The demo's, but that a run may end when it has reached `target`."""

    seeds: int = 7
    target: float = 0.9
    max_steps: int = 130
    num_groups: int = 64
    group_size: int = 16


QUICK = Setting(target=0.5, max_steps=60)


def rewards(name: str, lag: int, seed: int, setting: Setting, folder: Path) -> list[float]:
    """Of each version, until one reaches the target."""
    model = folder / f"{name}-{lag}-{seed}"
    init_model(TINY_QWEN3, model, seed)
    trainee = ActorCritic(_learner(name, model, seed), needs_proximal=name in NEEDS_PROXIMAL)
    sampler = Sampler(
        load_model(model), model / "tokenizer.json", seed, group_size=setting.group_size
    )
    states: deque[State] = deque([copy_weights(trainee.actor)], maxlen=lag + 1)
    found: list[float] = []
    for step in range(setting.max_steps):
        sampler.load(states[0])
        number = step - len(states) + 1
        batch = sampler.batch(setting.num_groups, number=number, trains_from=step)
        reward = float(batch.row_columns["reward"].mean())
        if number == len(found):  # the first `lag` batches are all of version 0
            found.append(reward)
        if reward >= setting.target:
            break
        trainee.step(batch)
        states.append(copy_weights(trainee.actor))
    return found


def _learner(name: str, model: Path, seed: int) -> Learner:
    config = demo_config(seed)
    training = config.training
    schedule = Schedule(
        peak=training.learning_rate,
        shape=Shape(training.lr_scheduler_type),
        num_steps=training.steps,
    )
    return Learner(
        Actor(load_model(model), learns_entropy=True),
        _objective(name, config.algorithm.entropy_coef),
        Optimizer(schedule=schedule, weight_decay=training.weight_decay),
        update_spec=UpdateSpec(),
        forward_pass=ForwardPass(ranks=SingleRank(), micro_batch_tokens=1 << 15),
    )


def _objective(name: str, entropy_coef: float) -> Objective | BudgetedObjective:
    def with_entropy(inner: Objective) -> Objective:
        return EntropyBonus(inner=inner, coef=entropy_coef)

    if name == "m2po":
        return WrappedBudget(budget=M2poBudget(), wrap=with_entropy)
    return with_entropy(LOSSES[name]())


def versions_to(target: float, rewards: Sequence[float]) -> float:
    """Where the curve first crosses the target, between two versions; infinite if it does not."""
    for number, reward in enumerate(rewards):
        if reward >= target:
            before = rewards[number - 1] if number else 0.0
            return number - 1 + (target - before) / (reward - before) if number else 0.0
    return math.inf


def sweep(
    setting: Setting, folder: Path, runs: Path, arms: Sequence[tuple[str, int]] = ARMS
) -> dict[tuple[str, int], list[list[float]]]:
    """The curves of each arm, by seed. Each run's line is written as it ends; those that are there
    and went as far are not run again."""
    done = _read(runs, setting.target)
    for seed in range(setting.seeds):
        for name, lag in arms:
            if (name, lag, seed) in done:
                continue
            began_at = time.process_time()
            curve = done[name, lag, seed] = rewards(name, lag, seed, setting, folder)
            took_s = time.process_time() - began_at
            to = ", ".join(f"{target}: {versions_to(target, curve):.1f}" for target in TARGETS)
            log_line(f"seed {seed}, {name:10} lag {lag}: {to} ({took_s:.0f} s)")
            with runs.open("a") as lines:
                lines.write(json.dumps([name, lag, seed, setting.target, curve]) + "\n")
    return {arm: [done[*arm, seed] for seed in range(setting.seeds)] for arm in arms}


def _read(runs: Path, target: float) -> dict[tuple[str, int, int], list[float]]:
    if not runs.exists():
        return {}
    lines = [json.loads(line) for line in runs.read_text().splitlines()]
    return {(name, lag, seed): curve for name, lag, seed, to, curve in lines if to >= target}


def mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """With its 95 % interval."""
    if len(values) < 2 or math.inf in values:
        return statistics.fmean(values), 0.0
    half = T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def figures(found: Mapping[tuple[str, int], Sequence[Sequence[float]]]) -> dict[str, float]:
    """`…_cost_50`: versions more than fresh data needs, seed by seed."""
    values: dict[str, float] = {}
    for target in TARGETS:
        fresh = [versions_to(target, curve) for curve in found["clip", 0]]
        if math.inf in fresh:
            continue
        percent = round(100 * target)
        values[f"fresh_{percent}"] = statistics.fmean(fresh)
        for (name, lag), curves in found.items():
            if not lag:
                continue
            stale = [versions_to(target, curve) for curve in curves]
            reached = [(s, f) for s, f in zip(stale, fresh, strict=True) if s < math.inf]
            values[f"{name}_missed_{percent}"] = len(stale) - len(reached)
            if reached:
                mean, half = mean_and_half_width([s - f for s, f in reached])
                values[f"{name}_cost_{percent}"] = mean
                values[f"{name}_cost_{percent}_half_width"] = half
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="until 0.5 only")
    parser.add_argument("--seeds", type=int, help="how many; default: 7")
    parser.add_argument("--runs", type=Path, help="keep finished runs here, and go on from them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting = QUICK if arguments.quick else Setting()
    if arguments.seeds:
        setting = Setting(seeds=arguments.seeds, target=setting.target, max_steps=setting.max_steps)
    with scratch(None) as folder:
        found = sweep(setting, folder, arguments.runs or folder / "runs.jsonl")
    result(**figures(found), seeds=setting.seeds)


if __name__ == "__main__":
    main()
