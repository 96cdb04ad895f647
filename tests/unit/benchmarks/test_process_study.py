# SPDX-License-Identifier: Apache-2.0
"""The process study at a small size: what its steps earn, what its arms share, what it reports."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from benchmarks.process_study import (
    ARMS,
    GROUP_SIZE,
    HONEST,
    Curve,
    SeedResult,
    Setting,
    describe,
    run_seed,
)
from benchmarks.step_workload import (
    NUM_STEPS,
    Attempt,
    Player,
    long_step,
    make_batch,
    make_tasks,
    make_trace,
    one_letter,
    right_letter,
)

from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model
from penstock.trainer.prm.traces import Step

TINY = Setting(seeds=3, warm_up=2, steps=3, num_groups=2, num_traces=40, prm_epochs=1)


def attempt(*actions: str, malformed: str = "") -> Attempt:
    shown = ("a", "b", "d")
    steps = [Step(prompt=f">{s}", action=a) for s, a in zip(shown, actions, strict=True)]
    steps[-1] = Step(prompt=">d", action=actions[-1], malformed=malformed)
    return Attempt(task=shown, turns=(), steps=tuple(steps))


def test_only_right_answers_throughout_earn_the_outcome() -> None:
    assert attempt("b", "c", "a").reward == 1
    assert attempt("b", "c", "d").reward == 0
    assert attempt("b", "c", "a", malformed="cut off").reward == 0


def test_labels_of_steps() -> None:
    trace = make_trace(attempt("b", "b", "aa"), "1.0")

    def labels(fn: Callable[..., float]) -> list[float]:
        return [fn("", trace=trace, step=step) for step in range(NUM_STEPS)]

    assert labels(right_letter) == [1.0, 0.0, 0.0]
    assert labels(one_letter) == [1.0, 1.0, 0.0]
    assert labels(long_step) == [0.5, 0.5, 1.0]


def test_a_batch_holds_every_sampled_token_once(tmp_path: Path) -> None:
    init_model(TINY_QWEN3, tmp_path / "model", 0)
    player = Player(load_model(tmp_path / "model"), tmp_path / "model/tokenizer.json", 0)
    tasks = [task for task in make_tasks(random.Random(0), 2) for _ in range(GROUP_SIZE)]
    attempts = player.play(tasks, 0)
    batch = make_batch(attempts, GROUP_SIZE, 0)
    assert batch.num_groups == 2
    assert batch.samples.num_trained == sum(one.num_tokens for one in attempts)
    turns = set(zip(batch.rows_T.tolist(), batch.samples.turns_T.tolist(), strict=True))
    assert len(turns) == len(tasks) * NUM_STEPS


@pytest.mark.slow
def test_a_seed_trains_every_arm_and_its_figures_are_reported(tmp_path: Path) -> None:
    found = run_seed(TINY, 0, tmp_path)
    assert set(found.curves) == set(ARMS)
    assert {len(curve.outcomes) for curve in found.curves.values()} == {TINY.steps}
    first = {curve.tokens[0] for curve in found.curves.values()}
    assert len(first) == 1, "the arms do not begin with the same attempts"
    assert all("process/score" in one for one in found.curves["process"].metrics)
    assert set(found.agreements) == {"right_letter", "long_step"}


def flat(outcome: float) -> Curve:
    return Curve(outcomes=[outcome] * TINY.steps, scores=[0.5], metrics=[], tokens=[10])


def test_arms_are_compared_seed_by_seed() -> None:
    gains = [0.1, 0.2, 0.3]
    found = [
        SeedResult(
            curves={name: flat(0.5 + gain * (name == "process")) for name in ARMS},
            agreements={},
            cpu_s=1.0,
        )
        for gain in gains
    ]
    figures = describe(found, TINY)
    assert figures["over_outcome"]["process"]["final"]["mean"] == pytest.approx(np.mean(gains))
    half = 4.303 * np.std(gains, ddof=1) / np.sqrt(3)
    assert figures["over_outcome"]["process"]["all"]["half_width"] == pytest.approx(half, abs=1e-4)
    assert figures["over_outcome"]["weighted"]["final"] == {"mean": 0.0, "half_width": 0.0}
    assert set(figures["over_outcome"]) == set(HONEST) - {"outcome"}
    assert figures["cpu_s"] == 3
