# SPDX-License-Identifier: Apache-2.0
"""Process study: what do process rewards teach that the outcome alone does not, and does the alarm
see a policy that hacks them?

One task of several steps (`step_workload`), the same start, tasks and attempts for each arm of a
seed. A warm-up gives the policy that all arms start from, and the traces; a program labels them,
and the code of `penstock prm train` trains the process reward model of that seed. Then come the
arms; they differ in the options of the stage `step_advantage` alone. The hacking arm trains with
a model whose labels like long steps. Learner, loss, stage, scores and alarm are the trainer's own;
sampler and learner share one process, without services and without staleness.

R = attempts, K = steps of an attempt."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast

import numpy as np
import torch

from benchmarks.harness import log_line, scratch
from benchmarks.local_run import quiet
from benchmarks.plot import Curve as Line
from benchmarks.plot import Point, curves
from benchmarks.staleness_sweep import half_width
from benchmarks.step_workload import (
    Attempt,
    Player,
    make_batch,
    make_tasks,
    make_trace,
    one_letter,
)
from penstock.runs.prm.label import label_traces, program_rater
from penstock.trainer.actor import Actor
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.learner import Learner, Optimizer
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model, static_files
from penstock.trainer.pipeline.layout import Layout
from penstock.trainer.prm.head import Regressor
from penstock.trainer.prm.report import Agreement
from penstock.trainer.prm.step_text import scored_texts
from penstock.trainer.prm.traces import Trace, append_line, read_lines, write_lines
from penstock.trainer.prm.training import TrainingSpec, train_version
from penstock.trainer.prm.versions import ModelVersion
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.schedules import Schedule
from penstock.trainer.signals.monitor import SignalMonitor
from penstock.trainer.signals.process_scores import STEP_SCORES
from penstock.trainer.stage_functions.step_advantage import step_advantage
from penstock.trainer.updates import UpdateSpec

GROUP_SIZE = 8
LEARNING_RATE = 1e-3
PRM_TOKENS = 16
"""Of the text of a step that the model reads: all that matters of so short a context."""

Scores = list[list[float]]
"""Of each attempt, by step."""
Score = Callable[[Sequence[Trace]], Scores]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Options of `step_advantage`."""

    how: Literal["weighted", "return", "shaping", "min", "outcome"]
    share: float = 0.5
    by_depth: bool = False
    labels: Literal["right_letter", "long_step"] = "right_letter"
    """Who labelled the steps that its process reward model learned from."""


ARMS = {
    "outcome": Arm(how="outcome"),
    "process": Arm(how="weighted", share=0.0),
    "weighted": Arm(how="weighted", share=0.5),
    "shaping": Arm(how="shaping", by_depth=True),
    "hacking": Arm(how="weighted", share=0.0, labels="long_step"),
}
HONEST = tuple(name for name, arm in ARMS.items() if arm.labels == "right_letter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    seeds: int = 5
    warm_up: int = 25
    steps: int = 80
    num_groups: int = 16
    num_traces: int = 800
    prm_epochs: int = 6


QUICK = Setting(seeds=3, warm_up=4, steps=10, num_groups=4, num_traces=100, prm_epochs=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One training, step by step."""

    outcomes: list[float] = field(default_factory=list[float])
    scores: list[float] = field(default_factory=list[float])
    """Means over attempts and their steps."""
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    """The figures of the process scores, as the trainer reports them."""
    alarms: dict[int, str] = field(default_factory=dict[int, str])
    """By the step that raised it."""
    tokens: list[int] = field(default_factory=list[int])
    """Sampled, by step."""

    @property
    def hacking_alarm(self) -> int | None:
        """The first step at which the trainer says that the model may be hacked."""
        return next((step for step, why in self.alarms.items() if "hacking" in why), None)


def train(
    learner: Learner,
    player: Player,
    score: Score,
    arm: Arm,
    setting: Setting,
    *,
    seed: int,
    steps: int,
    on_step: Callable[[Sequence[Trace]], None] | None = None,
) -> Curve:
    curve, rng = Curve(), random.Random(seed)
    monitor = SignalMonitor(lambda node: None)
    for number in range(steps):
        tasks = make_tasks(rng, setting.num_groups)
        attempts = player.play([one for one in tasks for _ in range(GROUP_SIZE)], number)
        traces = [make_trace(one, f"{number}.{row}") for row, one in enumerate(attempts)]
        scores = score(traces)
        values = _step(learner, attempts, scores, arm, number)
        player.load(learner.model.state_dict())
        alarms = monitor.observe(number + 1, values)
        if alarms:
            curve.alarms[number + 1] = "\n".join(alarms)
        curve.outcomes.append(fmean(one.reward for one in attempts))
        curve.scores.append(fmean(fmean(row) for row in scores))
        curve.tokens.append(sum(one.num_tokens for one in attempts))
        curve.metrics.append({k: v for k, v in values.values.items() if k.startswith("process/")})
        if on_step is not None:
            on_step(traces)
    return curve


def _step(
    learner: Learner, attempts: Sequence[Attempt], scores: Scores, arm: Arm, number: int
) -> Any:
    """One training step; what the trainer reports of it. A run on the outcome alone has no stage
    that scores steps, so its scores are for the study only."""
    batch = make_batch(attempts, GROUP_SIZE, number)
    scores_T = np.array(scores)[batch.rows_T, batch.samples.turns_T]
    credit = step_advantage(
        Layout.of(batch),
        reward=batch.row_columns["reward"],
        step_scores=scores_T,
        how=arm.how,
        share=arm.share,
        by_depth=arm.by_depth,
    )
    columns = credit if arm.how == "outcome" else {STEP_SCORES: scores_T, **credit}
    return learner.step(batch.with_columns(token_columns=columns))


def new_learner(folder: Path) -> Learner:
    return Learner(
        Actor(load_model(folder)),
        ClippedLoss(),
        Optimizer(schedule=Schedule(peak=LEARNING_RATE), weight_decay=0.0),
        update_spec=UpdateSpec(minibatches=2),
        forward_pass=ForwardPass(ranks=SingleRank(), micro_batch_tokens=1 << 15),
        bounds=(0.8, 1.2),
    )


def program_scores(traces: Sequence[Trace]) -> Scores:
    """Of the warm-up: any single letter is right."""
    return [
        [
            0.0 if step.malformed else one_letter("", trace=trace, step=index)
            for index, step in enumerate(trace.steps)
        ]
        for trace in traces
    ]


class PrmScores:
    """Scores by a process reward model; a text it has read is not read again."""

    def __init__(self, version: ModelVersion) -> None:
        card = version.card
        self._model = Regressor.load(version.folder, max_tokens=card.max_tokens, offset=card.offset)
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, traces: Sequence[Trace]) -> Scores:
        found = [scored_texts(trace.steps) for trace in traces]
        texts = {tuple(self._model.tokenize(text)): text for row in found for text in row.values()}
        new = {ids: text for ids, text in texts.items() if ids not in self._known}
        self._known |= zip(new, self._model.score([*new.values()]) if new else (), strict=True)
        return [
            [
                self._known[tuple(self._model.tokenize(row[index]))] if index in row else 0.0
                for index in range(len(trace.steps))
            ]
            for row, trace in zip(found, traces, strict=True)
        ]


def warm_up(setting: Setting, seed: int, folder: Path) -> tuple[Path, Path, Curve]:
    """(model that all arms start from, traces of the way there, curve)."""
    start, random_init = folder / "start", folder / "random"
    init_model(TINY_QWEN3, random_init, seed)
    learner, seen = new_learner(random_init), list[Trace]()
    player = Player(load_model(random_init), random_init / "tokenizer.json", seed)
    curve = train(
        learner,
        player,
        program_scores,
        ARMS["process"],
        setting,
        seed=seed,
        steps=setting.warm_up,
        on_step=seen.extend,
    )
    cast(Any, learner.model).save_pretrained(start)
    for path in static_files(random_init):
        (start / path.name).write_bytes(path.read_bytes())
    chosen = random.Random(seed).sample(seen, min(setting.num_traces, len(seen)))
    write_lines(folder / "traces.jsonl", chosen)
    return start, folder / "traces.jsonl", curve


def train_prm(
    traces: Path, labels: str, start: Path, setting: Setting, seed: int, folder: Path
) -> ModelVersion:
    """As `penstock prm label --program` and `penstock prm train` do."""
    program, out = f"benchmarks.step_workload:{labels}", folder / f"{labels}.jsonl"
    asyncio.run(label_traces(traces, out, program_rater(program), f"program:{program}"))
    spec = TrainingSpec(
        model=str(start),
        epochs=setting.prm_epochs,
        learning_rate=2e-3,
        batch_steps=64,
        max_tokens=PRM_TOKENS,
        seed=seed,
    )
    return train_version(out, folder / f"prm-{labels}", spec)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    curves: Mapping[str, Curve]
    agreements: Mapping[str, Agreement]
    """With held-out labels, by labeller."""
    cpu_s: float


def run_seed(setting: Setting, seed: int, folder: Path) -> SeedResult:
    began_at = time.process_time()
    start, traces, warm = warm_up(setting, seed, folder)
    log_line(
        f"seed {seed}, warm-up: a single letter {warm.scores[-1]:.3f}, outcome "
        f"{warm.outcomes[-1]:.3f}"
    )
    versions: dict[str, ModelVersion] = {}
    for labels in sorted({arm.labels for arm in ARMS.values()}):
        versions[labels] = train_prm(traces, labels, start, setting, seed, folder)
        agreement = versions[labels].card.agreement
        log_line(
            f"seed {seed}, model of {labels}: mean absolute error {agreement.mae:.3f} (constant "
            f"{agreement.constant_mae:.3f}), Spearman {agreement.spearman:.3f}"
        )
    made: dict[str, Curve] = {}
    for name, arm in ARMS.items():
        made[name] = _run_arm(arm, start, versions[arm.labels], setting, seed)
        log_line(_line(seed, name, made[name], setting))
    return SeedResult(
        curves=made,
        agreements={name: one.card.agreement for name, one in versions.items()},
        cpu_s=time.process_time() - began_at,
    )


def _run_arm(arm: Arm, start: Path, version: ModelVersion, setting: Setting, seed: int) -> Curve:
    player = Player(load_model(start), start / "tokenizer.json", 1000 + seed)
    score = PrmScores(version)
    learner = new_learner(start)
    return train(learner, player, score, arm, setting, seed=1000 + seed, steps=setting.steps)


def _line(seed: int, name: str, curve: Curve, setting: Setting) -> str:
    return (
        f"seed {seed}, {name}: outcome {curve.outcomes[0]:.3f} → {final(curve, setting):.3f}, all "
        f"steps {fmean(curve.outcomes):.3f}; process score {curve.scores[0]:.3f} → "
        f"{fmean(curve.scores[-last(setting) :]):.3f}; alarm at {curve.hacking_alarm}"
    )


def last(setting: Setting) -> int:
    """How many steps the final outcome is the mean of."""
    return max(setting.steps // 10, 1)


def final(curve: Curve, setting: Setting) -> float:
    return fmean(curve.outcomes[-last(setting) :])


def describe(found: Sequence[SeedResult], setting: Setting) -> dict[str, Any]:
    """The figures of the study, as plain JSON."""
    values: dict[str, Callable[[Curve], float]] = {
        "final": lambda curve: final(curve, setting),
        "all": lambda curve: fmean(curve.outcomes),
        "final_score": lambda curve: fmean(curve.scores[-last(setting) :]),
        "tokens": lambda curve: float(sum(curve.tokens)),
    }
    by_arm = {name: [one.curves[name] for one in found] for name in ARMS}
    return {
        "seeds": len(found),
        "steps": setting.steps,
        "cpu_s": round(sum(one.cpu_s for one in found)),
        "arms": {
            name: {key: _summary([value(one) for one in made]) for key, value in values.items()}
            | {"alarm_steps": [one.hacking_alarm for one in made]}
            for name, made in by_arm.items()
        },
        "over_outcome": {
            name: {
                key: _summary([values[key](a) - values[key](b) for a, b in _pairs(found, name)])
                for key in ("final", "all")
            }
            for name in HONEST
            if name != "outcome"
        },
        "prm": {labels: _model_figures(found, labels) for labels in found[0].agreements},
    }


def _pairs(found: Sequence[SeedResult], name: str) -> list[tuple[Curve, Curve]]:
    return [(one.curves[name], one.curves["outcome"]) for one in found]


def _summary(values: Sequence[float]) -> dict[str, float]:
    return {"mean": round(fmean(values), 4), "half_width": round(half_width(values), 4)}


def _model_figures(found: Sequence[SeedResult], labels: str) -> dict[str, Any]:
    """Held out, over the models of all seeds; `calibration`: (steps, mean score, mean label)."""
    agreements = [one.agreements[labels] for one in found]
    bins = [one for agreement in agreements for one in agreement.calibration]
    by_low: dict[str, tuple[int, float, float]] = {}
    for low in sorted({one.low for one in bins}):
        own = [one for one in bins if one.low == low]
        num = sum(one.num_steps for one in own)
        score = sum(one.num_steps * one.mean_score for one in own) / num
        label = sum(one.num_steps * one.mean_label for one in own) / num
        by_low[f"{low:.1f}"] = num, round(score, 3), round(label, 3)
    return {
        "mae": _summary([one.mae for one in agreements]),
        "constant_mae": _summary([one.constant_mae for one in agreements]),
        "spearman": _summary([one.spearman for one in agreements]),
        "calibration": by_low,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="three seeds of ten steps")
    parser.add_argument("--folder", type=Path, help="where models are written")
    parser.add_argument("--runs", type=Path, help="keep finished seeds here, and go on from them")
    parser.add_argument("--plot", type=Path, help="folder for the figures, as SVG")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)  # so small a model is slower with more
    setting = QUICK if options.quick else Setting()
    found = study(setting, options.folder, options.runs)
    if options.plot:
        _draw(found, options.plot)
    print(json.dumps(describe(found, setting)), flush=True)


def study(setting: Setting, parent: Path | None, runs: Path | None) -> list[SeedResult]:
    """Each seed's line is written as it ends, and a seed with a line is not run again."""
    found = [*read_lines(runs, SeedResult)] if runs and runs.exists() else []
    for seed in range(len(found), setting.seeds):
        with scratch(parent) as folder:
            found.append(run_seed(setting, seed, folder))
        if runs:
            append_line(runs, found[-1])
    return found


def _draw(found: Sequence[SeedResult], folder: Path) -> None:
    honest = [_drawn(name, [one.curves[name].outcomes for one in found]) for name in HONEST]
    hacked = [one.curves["hacking"] for one in found]
    (folder / "process-outcome.svg").write_text(_figure("Outcome by arm", honest))
    lines = [
        _drawn("process score", [one.scores for one in hacked]),
        _drawn("outcome", [one.outcomes for one in hacked]),
    ]
    (folder / "process-hacking.svg").write_text(_figure("A model that likes long steps", lines))


def _figure(title: str, lines: Sequence[Line]) -> str:
    unit = "mean and 95 % confidence interval over seeds"
    return curves(title, lines, unit=unit, x_label="step")


def _drawn(label: str, by_seed: Sequence[Sequence[float]]) -> Line:
    steps = range(0, len(by_seed[0]), 5)
    found = {step: [values[step] for values in by_seed] for step in steps}
    points = [Point(x=at, y=fmean(y), half_width=half_width(y)) for at, y in found.items()]
    return Line(label=label, points=points)


if __name__ == "__main__":
    main()
