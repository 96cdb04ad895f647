# SPDX-License-Identifier: Apache-2.0
"""The proof that data algorithms work, at a small size: each claim can fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from benchmarks.bandit import Learner, TaskSet
from benchmarks.data_algorithms import VARIANTS, Reached, Setting, Summary, expiry, train
from benchmarks.plot import Bar, bars

SMALL = Setting(num_tasks=48, groups_per_batch=8, target=0.6)


def reached(tmp_path: Path, name: str) -> Reached:
    return asyncio.run(train(SMALL, VARIANTS[name], 0, tmp_path / name))


def test_rules_change_what_a_target_costs(tmp_path: Path) -> None:
    plain = reached(tmp_path, "dynamic sampling")
    vanilla = reached(tmp_path, "vanilla")
    replayed = reached(tmp_path, "replay 0.5")
    assert min(run.accuracy for run in (plain, vanilla, replayed)) >= SMALL.target
    assert plain.steps < vanilla.steps, "batches without empty groups teach more"
    assert plain.wasted > 0.3 and vanilla.wasted == 0
    assert replayed.rollouts < 0.8 * plain.rollouts, "half of each batch was served before"


def test_greso_skips_what_would_be_refused(tmp_path: Path) -> None:
    plain, picky = reached(tmp_path, "dynamic sampling"), reached(tmp_path, "greso")
    assert picky.skipped > 0 and plain.skipped == 0
    assert picky.wasted < plain.wasted


def test_edf_keeps_long_answers_that_fifo_lets_expire() -> None:
    edf, fifo = (expiry(name, [0], 25) for name in ("edf", "fifo"))
    assert edf.expired_share < 0.5 * fifo.expired_share
    assert fifo.mean_expired > 1.2 * fifo.mean_consumed, "FIFO is biased to short answers"


def test_a_group_of_equal_rewards_teaches_nothing() -> None:
    from penstock.types import (
        GroupId,
        Manifest,
        OutcomeKind,
        PolicyName,
        RowId,
        RowSummary,
        SealedGroup,
    )

    def group(*rewards: float) -> SealedGroup:
        rows = tuple(
            RowSummary(
                row_id=RowId(f"p0-1.{slot}.1"),
                digest="",
                reward=reward,
                outcome=OutcomeKind.COMPLETED,
                sampled={PolicyName("policy"): 1},
                versions={PolicyName("policy"): ((1, 0),)},
            )
            for slot, reward in enumerate(rewards)
        )
        return SealedGroup(group_id=GroupId("p0-1"), task_key="t", rows=rows)

    def trained(*rewards: float) -> float:
        learner = Learner(TaskSet.draw(np.random.default_rng(0), 3))
        batch = Manifest(consumer="policy", seq=1, trains_from=0, groups=(group(*rewards),))
        learner.train(batch, [1])
        return float(learner.skills[-1])

    assert trained(1.0, 1.0) == trained(0.0, 0.0) == 0.0
    assert trained(1.0, 0.0) > 0.0


def test_confidence_interval_and_plot() -> None:
    found = Summary.of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.mean == 3.0 and found.half_width == pytest.approx(1.963, abs=1e-3)
    svg = bars("A & B", [Bar(label="<x>", value=2.0, half_width=1.0)], unit="rollouts")
    assert "A &amp; B" in svg and "&lt;x&gt;" in svg and svg.startswith("<svg")
