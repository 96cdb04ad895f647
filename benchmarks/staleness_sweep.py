# SPDX-License-Identifier: Apache-2.0
"""Staleness sweep: the demo task trained on answers that are 0, 1, 4, 8 and 16 versions old.

Which loss breaks where. Every batch has exactly the lag named, so this is the hard end of what a
staleness bound allows. Learner and sampler share a process; everything else is the trainer's own.
`ppo` clips against the sampling policy, `ppo_critic` has a critic instead of groups, `decoupled`
and `m2po` are as in the documentation. A run has broken when its last versions answer worse than
the target; `breaks_at` is the first lag at which the mean over seeds has."""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness import result, say, scratch
from benchmarks.plot import Curve, Point, curves
from benchmarks.virtual_lag import Sampler, Trainee, train
from penstock.trainer.actor import Actor
from penstock.trainer.critic import Critic
from penstock.trainer.divergence import WithEntropy
from penstock.trainer.gae import ValueLoss
from penstock.trainer.gang import Alone
from penstock.trainer.learner import Learner, Optimizer
from penstock.trainer.m2po import M2po
from penstock.trainer.models import TINY_QWEN3, init_model, load_model
from penstock.trainer.objectives import Clipped, Decoupled, Wrapped
from penstock.trainer.schedules import Schedule
from penstock.trainer.scoring import Passes, Scorer
from penstock.trainer.tokens import Budgeted, Objective
from penstock.trainer.updates import Cut

TARGET = 0.8
ENTROPY = 0.01
LAGS: Mapping[str, Sequence[int]] = {
    "ppo": (0, 1, 4, 8, 16),
    "ppo_critic": (0, 1, 4),
    "decoupled": (0, 1, 4, 8, 16),
    "m2po": (0, 1, 4, 8, 16),
}
T_95 = {1: math.inf, 2: 12.706, 3: 4.303, 5: 2.776}
"""Student's t, two-sided 95 %, by number of seeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    steps: int = 100
    num_groups: int = 32
    minibatches: int = 4
    learning_rate: float = 1e-3
    critic_rate: float = 3e-3
    seeds: int = 5


QUICK = Setting(steps=4, num_groups=8, seeds=2)


def run(name: str, lag: int, seed: int, setting: Setting, folder: Path) -> float:
    """Mean reward of the last versions' own answers."""
    home = folder / f"{name}-{lag}-{seed}"
    init_model(TINY_QWEN3, home, seed)
    sampler = Sampler(load_model(home), home / "tokenizer.json", seed)
    rewards = train(
        _trainee(name, home, setting),
        sampler,
        lag=lag,
        steps=setting.steps,
        num_groups=setting.num_groups,
    )
    return statistics.fmean(rewards[-max(setting.steps // 10, 1) :])


def _trainee(name: str, home: Path, setting: Setting) -> Trainee:
    critic = None
    if name == "ppo_critic":
        critic = _learner(Critic(load_model(home)), ValueLoss(), setting.critic_rate, setting)
    actor = new_learner(name, home, setting)
    return Trainee(actor, critic, needs_proximal=name == "decoupled")


def new_learner(name: str, home: Path, setting: Setting) -> Learner:
    """The policy's."""
    actor = Actor(load_model(home), learns_entropy=True)
    return _learner(actor, _objective(name), setting.learning_rate, setting)


def _learner(
    scorer: Scorer, objective: Objective | Budgeted, rate: float, setting: Setting
) -> Learner:
    is_critic = isinstance(objective, ValueLoss)
    return Learner(
        scorer,
        objective,
        Optimizer(schedule=Schedule(peak=rate), weight_decay=0.0),
        cut=Cut(minibatches=setting.minibatches, needs_advantage=not is_critic),
        passes=Passes(ranks=Alone(), micro_batch_tokens=1 << 15),
    )


def _objective(name: str) -> Objective | Budgeted:
    def with_entropy(inner: Objective) -> Objective:
        return WithEntropy(inner=inner, coef=ENTROPY)

    if name == "m2po":
        return Wrapped(budget=M2po(), wrap=with_entropy)
    return with_entropy(Decoupled() if name == "decoupled" else Clipped())


def sweep(setting: Setting, folder: Path) -> dict[str, dict[int, list[float]]]:
    """By loss and lag, the final reward of each seed."""
    found: dict[str, dict[int, list[float]]] = {}
    for name, lags in LAGS.items():
        for lag in lags:
            began_at = time.perf_counter()
            finals = [run(name, lag, seed, setting, folder) for seed in range(setting.seeds)]
            found.setdefault(name, {})[lag] = finals
            seconds = (time.perf_counter() - began_at) / setting.seeds
            say(
                f"{name:10} lag {lag:2}: reward {statistics.fmean(finals):.3f} "
                f"± {half_width(finals):.3f}, worst {min(finals):.3f}, {seconds:.0f} s a run"
            )
    return found


def half_width(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return T_95[len(values)] * statistics.stdev(values) / math.sqrt(len(values))


def breaks_at(by_lag: Mapping[int, Sequence[float]]) -> int:
    """The first lag whose mean is below the target; -1 when none is."""
    broken = [lag for lag, finals in by_lag.items() if statistics.fmean(finals) < TARGET]
    return min(broken, default=-1)


def draw(found: Mapping[str, Mapping[int, Sequence[float]]], setting: Setting) -> str:
    lines = [
        Curve(
            label=name,
            points=[
                Point(x=lag, y=statistics.fmean(finals), half_width=half_width(finals))
                for lag, finals in by_lag.items()
            ],
        )
        for name, by_lag in found.items()
    ]
    unit = (
        f"mean reward of the last versions' own answers, {setting.steps} steps of "
        f"{setting.minibatches} updates, {setting.seeds} seeds, 95 % intervals"
    )
    return curves("Staleness: answers so many versions old", lines, unit=unit, x_label="lag")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs")
    parser.add_argument("--plot", type=Path, help="write the figure here, as SVG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    setting = QUICK if arguments.quick else Setting()
    with scratch(None) as folder:
        found = sweep(setting, folder)
    if arguments.plot:
        arguments.plot.write_text(draw(found, setting))
    figures: dict[str, float] = {}
    for name, by_lag in found.items():
        figures[f"{name}_breaks_at"] = breaks_at(by_lag)
        for lag, finals in by_lag.items():
            figures[f"{name}_{lag}"] = statistics.fmean(finals)
    result(steps=setting.steps, seeds=setting.seeds, **figures)


if __name__ == "__main__":
    main()
