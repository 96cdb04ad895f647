# SPDX-License-Identifier: Apache-2.0
"""Roles study: does a model per role learn more than one model for both roles, and does a reward
per role teach more than the team's?

Two workflows of two roles, three arms each, the same generated tokens in all. Team reward: each
role earns the mean of both. Learner, loss and advantages are the trainer's own; sampler and
learners share one process, without services and without staleness. Every arm of a seed gets the
same tasks.

R = rows, P = tokens of a prompt."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol

import numpy as np
import torch

from benchmarks.data_algorithms import Summary
from benchmarks.harness import log_line, result, scratch
from benchmarks.lagged_training import (
    NUM_GENERATIONS,
    ActorCritic,
    Answers,
    Floats,
    Ints,
    Sampler,
    make_batch,
)
from benchmarks.local_run import quiet
from benchmarks.plot import Curve as Line
from benchmarks.plot import Point, curves
from benchmarks.staleness_sweep import Setting as LearnerSetting
from benchmarks.staleness_sweep import new_learner
from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model

LETTERS = "abcdefghij"
LEARNER = LearnerSetting(learning_rate=2e-3, minibatches=2)


class Workflow(Protocol):
    """Two roles, one after the other. Prompts of both have one length."""

    max_tokens: int

    def make_task(self, rng: random.Random) -> tuple[str, str]:
        """Question and answer."""
        ...

    def first_prompt(self, question: str) -> str: ...
    def second_prompt(self, question: str, said: str) -> str: ...

    def rewards(self, answer: str, said: str, then: str) -> tuple[float, float]:
        """Of the first and of the second role."""
        ...


class Revise:
    """A solver writes two letters backwards, a reviser reads its draft and writes them again."""

    max_tokens = 2

    def make_task(self, rng: random.Random) -> tuple[str, str]:
        question = "".join(rng.choices(LETTERS, k=2))
        return question, question[::-1]

    def first_prompt(self, question: str) -> str:
        return f">>>{question}>"

    def second_prompt(self, question: str, said: str) -> str:
        return f"{said:>>2}{question}>>"

    def rewards(self, answer: str, said: str, then: str) -> tuple[float, float]:
        return _share_right(said, answer), _share_right(then, answer)


class Verify:
    """A solver adds two numbers from 0 to 4, a verifier says a for right and b for wrong."""

    max_tokens = 1

    def make_task(self, rng: random.Random) -> tuple[str, str]:
        first, second = rng.choices(range(5), k=2)
        return LETTERS[first] + LETTERS[second], LETTERS[first + second]

    def first_prompt(self, question: str) -> str:
        return f">>{question}>"

    def second_prompt(self, question: str, said: str) -> str:
        return f"{said:>>1}{question}>>"

    def rewards(self, answer: str, said: str, then: str) -> tuple[float, float]:
        return float(said == answer), float(then == ("a" if said == answer else "b"))


def _share_right(text: str, answer: str) -> float:
    return sum(a == b for a, b in zip(text, answer, strict=False)) / len(answer)


WORKFLOWS: Mapping[str, Callable[[], Workflow]] = {"revise": Revise, "verify": Verify}


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    models: int
    """One for both roles, or one for each."""
    is_team: bool
    """Each role earns the mean of both."""


ARMS = {
    "two models, role rewards": Arm(models=2, is_team=False),
    "one model, role rewards": Arm(models=1, is_team=False),
    "two models, team reward": Arm(models=2, is_team=True),
}
COMPARED = {
    "two_over_one": ("two models, role rewards", "one model, role rewards"),
    "roles_over_team": ("two models, role rewards", "two models, team reward"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    steps: int = 50
    num_groups: int = 24
    seeds: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """What one role did in a step."""

    prompts_RP: Ints
    answers: Answers
    rewards_R: Floats


class Players:
    """The models of one arm."""

    def __init__(self, arm: Arm, seed: int, folder: Path) -> None:
        self._trainees: list[ActorCritic] = []
        self._samplers: list[Sampler] = []
        for at in range(arm.models):
            model = folder / f"model-{at}"
            init_model(TINY_QWEN3, model, 1000 * at + seed)
            self._trainees.append(ActorCritic(new_learner("ppo", model, LEARNER)))
            sampler = Sampler(load_model(model), model / "tokenizer.json", 1000 * at + seed)
            self._samplers.append(sampler)

    def say(
        self, role: int, prompts: Sequence[str], *, copies: int, max_tokens: int
    ) -> tuple[Ints, Answers, list[str]]:
        sampler = self._samplers[role % len(self._samplers)]
        encoded = np.array([sampler.encode(prompt) for prompt in prompts])
        answers = sampler.answer(encoded, copies=copies, max_tokens=max_tokens)
        return np.repeat(encoded, copies, axis=0), answers, sampler.texts(answers)

    def train(self, turns: Sequence[Turns], step: int) -> None:
        """A step of each model on the turns of its roles; a group is one task and one role."""
        for at, (trainee, sampler) in enumerate(zip(self._trainees, self._samplers, strict=True)):
            own = turns[at :: len(self._trainees)]
            rewards_R = np.concatenate([one.rewards_R for one in own])
            numbers_R = np.full(rewards_R.size, step)
            prompts_RP = np.concatenate([one.prompts_RP for one in own])
            trainee.step(make_batch(prompts_RP, _joined(own), rewards_R, numbers_R, step))
            sampler.load(trainee.actor.model.state_dict())


def _joined(turns: Sequence[Turns]) -> Answers:
    return Answers(
        ids_RG=np.concatenate([one.answers.ids_RG for one in turns]),
        logprobs_RG=np.concatenate([one.answers.logprobs_RG for one in turns]),
        lengths_R=np.concatenate([one.answers.lengths_R for one in turns]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Mean reward of each role's own, step by step, whatever the arm trained on."""

    first: list[float]
    second: list[float]

    def both(self, begin: int = 0) -> float:
        """Mean over both roles and the steps from `begin`."""
        return fmean([*self.first[begin:], *self.second[begin:]])


def train(workflow: Workflow, arm: Arm, seed: int, setting: Setting, folder: Path) -> Curve:
    players, rng = Players(arm, seed, folder), random.Random(seed)
    curve = Curve(first=[], second=[])
    for step in range(setting.steps):
        tasks = [workflow.make_task(rng) for _ in range(setting.num_groups)]
        first, second = play(workflow, players, tasks)
        curve.first.append(float(first.rewards_R.mean()))
        curve.second.append(float(second.rewards_R.mean()))
        players.train(team(first, second) if arm.is_team else (first, second), step)
    return curve


def play(
    workflow: Workflow, players: Players, tasks: Sequence[tuple[str, str]]
) -> tuple[Turns, Turns]:
    """A group of attempts at each task, in which each role speaks once."""
    first_prompts = [workflow.first_prompt(question) for question, _ in tasks]
    prompts, answers, said = players.say(
        0, first_prompts, copies=NUM_GENERATIONS, max_tokens=workflow.max_tokens
    )
    rows = [task for task in tasks for _ in range(NUM_GENERATIONS)]
    second_prompts = [
        workflow.second_prompt(question, text)
        for (question, _), text in zip(rows, said, strict=True)
    ]
    then_prompts, then_answers, then = players.say(
        1, second_prompts, copies=1, max_tokens=workflow.max_tokens
    )
    rewards = np.array(
        [
            workflow.rewards(answer, one, other)
            for (_, answer), one, other in zip(rows, said, then, strict=True)
        ]
    )
    return (
        Turns(prompts_RP=prompts, answers=answers, rewards_R=rewards[:, 0]),
        Turns(prompts_RP=then_prompts, answers=then_answers, rewards_R=rewards[:, 1]),
    )


def team(first: Turns, second: Turns) -> tuple[Turns, Turns]:
    """The same turns, each with the mean of both rewards."""
    mean_R = (first.rewards_R + second.rewards_R) / 2
    return (
        Turns(prompts_RP=first.prompts_RP, answers=first.answers, rewards_R=mean_R),
        Turns(prompts_RP=second.prompts_RP, answers=second.answers, rewards_R=mean_R),
    )


Curves = dict[tuple[str, str], list[Curve]]
"""By workflow and arm, one per seed."""


def study(setting: Setting, parent: Path | None, runs: Path | None) -> Curves:
    found: Curves = {(name, arm): [] for name in WORKFLOWS for arm in ARMS}
    for seed in range(setting.seeds):  # interleaved, so that fewer seeds are a study too
        for (name, label), made in found.items():
            with scratch(parent) as folder:
                curve = train(WORKFLOWS[name](), ARMS[label], seed, setting, folder)
            made.append(curve)
            log_line(
                f"seed {seed}, {name}, {label}: {fmean(curve.first[-last(setting) :]):.3f}, "
                f"{fmean(curve.second[-last(setting) :]):.3f}; all steps {curve.both():.3f}"
            )
            if runs is not None:
                with runs.open("a") as lines:
                    line = [name, label, seed, curve.first, curve.second]
                    lines.write(json.dumps(line) + "\n")
    return found


def last(setting: Setting) -> int:
    """How many steps the final reward is the mean of."""
    return max(setting.steps // 10, 1)


def differences(
    found: Curves, workflow: str, arms: tuple[str, str], value: Callable[[Curve], float]
) -> Summary:
    """The first arm minus the second, by seed."""
    one, other = (found[workflow, arm] for arm in arms)
    return Summary.of([value(a) - value(b) for a, b in zip(one, other, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three seeds of ten steps")
    parser.add_argument("--folder", type=Path, help="where models are written")
    parser.add_argument("--runs", type=Path, help="append the curves of each run there")
    parser.add_argument("--plot", type=Path, help="folder for the figures, as SVG")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)  # so small a model is slower with more
    setting = Setting(steps=10, num_groups=16, seeds=3) if options.quick else Setting()
    found = study(setting, options.folder, options.runs)
    values: dict[str, Callable[[Curve], float]] = {
        "final": lambda curve: curve.both(-last(setting)),
        "all": lambda curve: curve.both(),
        "first": lambda curve: fmean(curve.first[-last(setting) :]),
        "second": lambda curve: fmean(curve.second[-last(setting) :]),
    }
    figures: dict[str, float] = {}
    for workflow in WORKFLOWS:
        for key, arms in COMPARED.items():
            for name, value in values.items():
                one = differences(found, workflow, arms, value)
                log_line(f"{workflow}, {key}, {name}: {one.mean:+.3f} ± {one.half_width:.3f}")
                figures[f"{workflow}_{key}_{name}"] = one.mean
                figures[f"{workflow}_{key}_{name}_half_width"] = one.half_width
    for workflow in WORKFLOWS if options.plot else ():
        (options.plot / f"roles-{workflow}.svg").write_text(_figure(found, workflow))
    result(seeds=setting.seeds, **figures)


def _figure(found: Curves, workflow: str) -> str:
    """The first role's reward by step, an interval over seeds at every fifth."""
    return curves(
        f"{workflow}: reward of the solver",
        [
            Line(label=arm, points=_points([curve.first for curve in found[workflow, arm]]))
            for arm in ARMS
        ],
        unit="mean and 95 % confidence interval over seeds",
        x_label="step",
    )


def _points(by_seed: Sequence[Sequence[float]]) -> list[Point]:
    steps = range(0, len(by_seed[0]), 5)
    summaries = {step: Summary.of([values[step] for values in by_seed]) for step in steps}
    return [Point(x=at, y=one.mean, half_width=one.half_width) for at, one in summaries.items()]


if __name__ == "__main__":
    main()
