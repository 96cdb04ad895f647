# SPDX-License-Identifier: Apache-2.0
"""Compares two runs, two versions or two files of results: scores, rewards, time per step.

Owns which results of a run count: of the version asked for, or of each suite's newest version; of
several files about one version, the newest. The formulas are in `evals`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

from penstock.errors import ConfigError
from penstock.evals.comparison import SuiteComparison, compare_suites
from penstock.evals.recording import FOLDER
from penstock.evals.results import Evaluation, SuiteResult
from penstock.fleet.run_folder import RunFolder
from penstock.runs.curves import REWARD, Curve, make_curves, read_records
from penstock.runs.result_files import read_results, run_results
from penstock.runs.target import find_run_folder

LAST_SHARE = 0.1
"""Of the steps, whose mean is the last reward: single steps are noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """The training of one policy of a run."""

    policy: str
    steps: int
    reward: float
    """Mean of the last tenth of its steps."""
    first_reward: float
    """Mean of the first tenth."""
    step_s: float | None
    """Median seconds between two steps; None before the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two."""

    name: str
    results: dict[str, SuiteResult]
    """By suite."""
    training: tuple[TrainingFacts, ...]
    """By policy; empty for a file of results."""
    curves: tuple[Curve, ...]
    """Mean reward by step."""

    def version(self, suite: str) -> str:
        found = self.results[suite]
        return f"{found.policy}@{found.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    a: Side
    b: Side
    suites: tuple[SuiteComparison, ...]
    only_one: tuple[str, ...]
    """Suites that only one of the two was evaluated on."""


def compare(first: str, second: str) -> Comparison:
    """Each a run folder or its config file, RUN@VERSION, or a file that `penstock eval` wrote."""
    a, b = _read_side(first), _read_side(second)
    if a.name == b.name:
        raise ConfigError(f"{first} and {second} are the same; name two runs, versions or files")
    if a.curves == b.curves:  # two versions of one run, or two files
        a, b = (replace(side, training=(), curves=()) for side in (a, b))
    common = [suite for suite in a.results if suite in b.results]
    suites = tuple(compare_suites(a.results[suite], b.results[suite]) for suite in common)
    only_one = tuple(sorted(a.results.keys() ^ b.results.keys()))
    if not suites and not (a.training and b.training):
        names = ", ".join(only_one) or "none"
        raise ConfigError(
            f"{first} and {second} share neither a suite nor a metric (suites of one: {names}); "
            "evaluate both with `penstock eval … --suite NAME`"
        )
    return Comparison(a=a, b=b, suites=suites, only_one=only_one)


def _read_side(where: str) -> Side:
    path = Path(where)
    if path.suffix == ".json":
        found = read_results(path)
        return Side(name=where, results=_newest([found]), training=(), curves=())
    run, version = _split_version(where)
    folder = find_run_folder(Path(run))
    results = run_results(folder.path)
    if version is not None:
        results = [found for found in results if found.step == version]
        if not results:
            raise ConfigError(
                f"{folder.path / FOLDER} has no results of version {version}; make them with "
                f"`penstock eval {run} --version {version} --suite NAME`"
            )
    curves = tuple(_reward_curves(folder))
    facts = tuple(_training(curve) for curve in curves if curve.steps)
    return Side(name=where, results=_newest(results), training=facts, curves=curves)


def _split_version(where: str) -> tuple[str, int | None]:
    """`RUN@5` is version 5 of RUN, unless a file or folder has this very name."""
    run, at, number = where.rpartition("@")
    if not at or not number.isdecimal() or Path(where).exists():
        return where, None
    return run, int(number)


def _newest(evaluations: Sequence[Evaluation]) -> dict[str, SuiteResult]:
    """By suite: of the newest version, the newest file."""
    found: dict[str, SuiteResult] = {}
    for result in (one for evaluation in evaluations for one in evaluation.suites):
        known = found.get(result.suite)
        if result.answers and (known is None or result.version >= known.version):
            found[result.suite] = result
    return found


def _reward_curves(folder: RunFolder) -> list[Curve]:
    return make_curves(folder.path.name, read_records(folder.metrics, (REWARD,)), REWARD)


def _training(curve: Curve) -> TrainingFacts:
    share = max(1, round(LAST_SHARE * len(curve.values)))
    pauses = [later - at for at, later in zip(curve.times, curve.times[1:], strict=False)]
    return TrainingFacts(
        policy=curve.policy,
        steps=curve.steps[-1],
        reward=fmean(curve.values[-share:]),
        first_reward=fmean(curve.values[:share]),
        step_s=median(pauses) if pauses else None,
    )
