# SPDX-License-Identifier: Apache-2.0
"""Staleness sweep: the demo task trained on answers that are 0, 1, 4, 8 and 16 versions old.

Which loss breaks where. Every batch has exactly the lag named, so this is the hard end of what a
staleness bound allows. Learner and sampler share a process; everything else is the trainer's own.
`ppo` clips against the sampling policy, `ppo_critic` has a critic instead of groups, `decoupled`
and `m2po` are as in the documentation. A loss has broken where the last versions earn less than
HELD of what they earn with the same loss and no lag, in as many steps: slower is broken too."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import log_line, result, scratch
from benchmarks.lagged_training import ActorCritic, Sampler, train
from benchmarks.plot import Curve, Point, curves
from penstock.trainer.actor import Actor
from penstock.trainer.advantages.gae import ValueLoss
from penstock.trainer.algorithms.decoupled import DecoupledLoss
from penstock.trainer.algorithms.m2po import M2poBudget
from penstock.trainer.build_objective import WrappedBudget
from penstock.trainer.critic import Critic
from penstock.trainer.forward_pass import ForwardPass, Scorer
from penstock.trainer.learner import Learner, Optimizer
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.divergence import EntropyBonus
from penstock.trainer.losses.tokens import BudgetedObjective, Objective
from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.schedules import Schedule
from penstock.trainer.updates import UpdateSpec

HELD = 0.8
ENTROPY = 0.01
LAGS: Mapping[str, Sequence[int]] = {
    "ppo": (0, 1, 4, 8, 16),
    "ppo_critic": (0, 1, 4),
    "decoupled": (0, 1, 4, 8, 16),
    "m2po": (0, 1, 4, 8, 16),
}
POINTS = [(name, lag) for name, lags in LAGS.items() for lag in lags]
Rewards = dict[str, dict[int, list[float]]]
T_95 = {1: math.inf, 2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t, two-sided 95 %, by number of seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    steps: int = 45
    num_groups: int = 128
    minibatches: int = 2
    learning_rate: float = 2e-3
    critic_rate: float = 4e-3
    seeds: int = 5
    lags: Sequence[int] = (0, 1, 4, 8, 16)


QUICK = Setting(seeds=1, lags=(0, 4))


def run(name: str, lag: int, seed: int, setting: Setting, folder: Path) -> float:
    """Mean reward of the last versions' own answers."""
    coordinator = folder / f"{name}-{lag}-{seed}"
    init_model(TINY_QWEN3, coordinator, seed)
    return train(
        _actor_critic(name, coordinator, setting),
        Sampler(load_model(coordinator), coordinator / "tokenizer.json", seed),
        lag=lag,
        steps=setting.steps,
        num_groups=setting.num_groups,
        num_evaluated=max(setting.steps // 10, 1),
    )


def _actor_critic(name: str, coordinator: Path, setting: Setting) -> ActorCritic:
    critic = None
    if name == "ppo_critic":
        critic = _learner(
            Critic(load_model(coordinator)), ValueLoss(), setting.critic_rate, setting
        )
    actor = new_learner(name, coordinator, setting)
    return ActorCritic(actor, critic, needs_proximal=name == "decoupled")


def new_learner(name: str, coordinator: Path, setting: Setting) -> Learner:
    """The policy's."""
    actor = Actor(load_model(coordinator), learns_entropy=True)
    return _learner(actor, _objective(name), setting.learning_rate, setting)


def _learner(
    scorer: Scorer, objective: Objective | BudgetedObjective, rate: float, setting: Setting
) -> Learner:
    is_critic = isinstance(objective, ValueLoss)
    return Learner(
        scorer,
        objective,
        Optimizer(schedule=Schedule(peak=rate), weight_decay=0.0),
        update_spec=UpdateSpec(minibatches=setting.minibatches, needs_advantage=not is_critic),
        forward_pass=ForwardPass(ranks=SingleRank(), micro_batch_tokens=1 << 15),
    )


def _objective(name: str) -> Objective | BudgetedObjective:
    def with_entropy(inner: Objective) -> Objective:
        return EntropyBonus(inner=inner, coef=ENTROPY)

    if name == "m2po":
        return WrappedBudget(budget=M2poBudget(), wrap=with_entropy)
    return with_entropy(DecoupledLoss() if name == "decoupled" else ClippedLoss())


def sweep(setting: Setting, folder: Path, runs: Path) -> Rewards:
    """Each run's line is written as it ends, and those of as many steps are not run again."""
    done = _read(runs, setting.steps)
    for seed in range(setting.seeds):
        for name, lag in POINTS:
            if lag not in setting.lags or (name, lag, seed) in done:
                continue
            began_at = time.perf_counter()
            reward = done[name, lag, seed] = run(name, lag, seed, setting, folder)
            log_line(
                f"seed {seed}, {name:10} lag {lag:2}: {reward:.3f} "
                f"in {time.perf_counter() - began_at:.0f} s"
            )
            with runs.open("a") as lines:
                lines.write(json.dumps([name, lag, seed, setting.steps, reward]) + "\n")
    return by_lag(done)


def _read(runs: Path, steps: int) -> dict[tuple[str, int, int], float]:
    if not runs.exists():
        return {}
    lines = [json.loads(line) for line in runs.read_text().splitlines()]
    return {(name, lag, seed): reward for name, lag, seed, of, reward in lines if of == steps}


def by_lag(done: Mapping[tuple[str, int, int], float]) -> Rewards:
    """By loss and lag, the final reward of each seed."""
    found: Rewards = {}
    for name, lag in POINTS:
        rewards = [done[point] for point in sorted(done) if point[:2] == (name, lag)]
        if rewards:
            found.setdefault(name, {})[lag] = rewards
    return found


def half_width(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def breaks_at(rewards: Mapping[int, Sequence[float]]) -> int:
    """The first lag that costs too much of the mean reward without lag; -1 when none does."""
    least = HELD * statistics.fmean(rewards[0])
    broken = [lag for lag, finals in rewards.items() if statistics.fmean(finals) < least]
    return min(broken, default=-1)


def draw(found: Mapping[str, Mapping[int, Sequence[float]]], setting: Setting) -> str:
    lines = [
        Curve(
            label=name,
            points=[
                Point(x=lag, y=statistics.fmean(finals), half_width=half_width(finals))
                for lag, finals in rewards.items()
            ],
        )
        for name, rewards in found.items()
    ]
    unit = (
        f"mean reward of the last versions' own answers, {setting.steps} steps of "
        f"{setting.minibatches} updates, 95 % intervals over {setting.seeds} seeds"
    )
    return curves(
        "Reward after training on answers so many versions old", lines, unit=unit, x_label="lag"
    )


def figures(found: Rewards) -> dict[str, float]:
    """`ratio`: what a proximal policy is worth at the largest lag that every loss has."""
    means = {
        f"{name}_{lag}": statistics.fmean(finals)
        for name, rewards in found.items()
        for lag, finals in rewards.items()
    }
    return {
        "figure": means["decoupled_4"],
        "baseline": means["ppo_4"],
        "ratio": means["decoupled_4"] / means["ppo_4"],
        **{f"{name}_breaks_at": breaks_at(rewards) for name, rewards in found.items()},
        **means,
        **{
            f"{name}_{lag}_half_width": half_width(finals)
            for name, rewards in found.items()
            for lag, finals in rewards.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, two lags; 3 minutes")
    parser.add_argument("--plot", type=Path, help="write the figure here, as SVG")
    parser.add_argument("--runs", type=Path, help="keep finished runs here, and go on from them")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting = QUICK if arguments.quick else Setting()
    with scratch(None) as folder:
        found = sweep(setting, folder, arguments.runs or folder / "runs.jsonl")
    if arguments.plot:
        arguments.plot.write_text(draw(found, setting))
    result(**figures(found), steps=setting.steps, seeds=setting.seeds)


if __name__ == "__main__":
    main()
