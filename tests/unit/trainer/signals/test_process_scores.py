# SPDX-License-Identifier: Apache-2.0
"""Process scores that rise without the outcome raise an alarm, and honest ones raise none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, random_batch

from penstock.trainer.batches import Batch, assemble
from penstock.trainer.learner import Stats
from penstock.trainer.ranks.group import SingleRank
from penstock.trainer.signals.alarms import ALARM_AFTER
from penstock.trainer.signals.monitor import SignalMonitor, from_json, to_json
from penstock.trainer.signals.process_scores import (
    NUM_WINDOWS,
    WINDOW_BATCHES,
    HackingWatch,
    score_metrics,
)

GOOD = {"tokens/trained": 100.0, "signal/informative_groups": 0.5}
NUM_BATCHES = NUM_WINDOWS * WINDOW_BATCHES


def batch_values(score: float, outcome: float, correlation: float = 0.6) -> dict[str, float]:
    return GOOD | {
        "process/rows": 16.0,
        "process/score": score,
        "process/score_std": 0.2,
        "process/outcome": outcome,
        "process/outcome_std": 0.4,
        "process/correlation": correlation,
    }


def alarms(values_at: Callable[[float], dict[str, float]], num: int = NUM_BATCHES) -> list[str]:
    """Of a run whose metrics at progress 0..1 are these; restarted from its checkpoint halfway."""
    monitor = SignalMonitor(lambda node: None)
    found: list[str] = []
    for seq in range(1, num + 1):
        if seq == num // 2:
            monitor = SignalMonitor(lambda node: None, from_json(to_json(monitor.state)))
        found += monitor.observe(seq, Stats(skipped=None, values=values_at(seq / num)))
    return found


def test_a_run_that_hacks_its_process_rewards_trips_the_alarm() -> None:
    [falling] = alarms(lambda at: batch_values(0.3 + 0.6 * at, 0.5 - 0.3 * at))
    assert "hacking the process reward model" in falling and "penstock prm" in falling
    assert len(alarms(lambda at: batch_values(0.3 + 0.6 * at, 0.5))) == 1, "flat"


def test_a_score_that_is_at_its_top_early_trips_it_as_well() -> None:
    """It rises in the first window and stays; of the rare good outcomes none is left."""

    def values(at: float) -> dict[str, float]:
        hacked = at > 0.2
        outcome, spread = (0.0, 0.0) if hacked else (0.01, 0.1)
        return batch_values(1.0 if hacked else 0.5, outcome, correlation=0.0) | {
            "process/score_std": 0.0 if hacked else 0.05,
            "process/outcome_std": spread,
        }

    [alarm] = alarms(values)
    assert "rose from 0.70 to 1.00 while the outcome went from 0.006 to 0.000" in alarm


def test_another_alarm_of_the_same_batch_hides_none() -> None:
    def values(at: float) -> dict[str, float]:
        is_last = at > 1 - ALARM_AFTER / NUM_BATCHES
        return batch_values(0.3 + 0.6 * at, 0.5) | {"signal/informative_groups": 1.0 - is_last}

    no_signal, hacking = alarms(values)
    assert "no learning signal" in no_signal and "hacking" in hacking


def test_honest_runs_trip_none() -> None:
    assert not alarms(lambda at: batch_values(0.3 + 0.6 * at, 0.2 + 0.7 * at)), "both rise"
    assert not alarms(lambda at: batch_values(0.5, 0.5 - 0.3 * at)), "scores do not rise"
    assert not alarms(lambda at: batch_values(0.3 + 0.6 * at, 0.5), NUM_BATCHES - 1), "too early"
    assert not alarms(lambda at: GOOD), "no scores at all"


def rare(score: float, outcome: float, correlation: float) -> dict[str, float]:
    spread = {"process/rows": 128.0, "process/outcome_std": (outcome * (1 - outcome)) ** 0.5}
    return batch_values(score, outcome, correlation) | spread


def test_outcomes_that_are_rare_by_nature_trip_none() -> None:
    """All steps must be right: the outcome follows slowly, by less than its own noise."""
    assert not alarms(lambda at: rare(0.2 + 0.1 * at, 0.004 + 0.004 * at, correlation=0.25))
    assert not alarms(lambda at: rare(0.2, 0.001, correlation=0.1)), "so few say nothing"


def test_scores_that_say_nothing_of_the_outcome_trip_it_too() -> None:
    [alarm] = alarms(lambda at: batch_values(0.5, 0.5, correlation=0.1))
    assert "correlation 0.10" in alarm
    assert not alarms(lambda at: batch_values(0.5, 0.5, correlation=0.3))


def test_an_all_solved_run_has_no_correlation() -> None:
    def values(at: float) -> dict[str, float]:
        solved = {"process/outcome": 1.0, "process/outcome_std": 0.0, "process/correlation": 0.0}
        return batch_values(0.5, 1.0) | solved

    assert not alarms(values)


def recorded(name: str) -> list[dict[str, float]]:
    """Metrics of each step of a real training: seed 0 of `python -m benchmarks.process_study`."""
    found = json.loads(Path(__file__).with_name("recorded_process_scores.json").read_text())
    return [GOOD | dict(zip(found["columns"], row, strict=True)) for row in found[name]]


def test_a_recorded_run_that_hacked_its_model_trips_the_alarm_and_an_honest_one_does_not() -> None:
    hacked, honest = recorded("hacking"), recorded("process")
    assert hacked[-1]["process/score"] > 0.9 > hacked[0]["process/score"], "the score rose"
    assert hacked[-1]["process/outcome"] == 0 < hacked[0]["process/outcome"], "the outcome fell"
    first, *_ = alarms(lambda at: hacked[round(at * len(hacked)) - 1], len(hacked))
    assert "hacking the process reward model" in first
    assert not alarms(lambda at: honest[round(at * len(honest)) - 1], len(honest))


def scored_batch() -> Batch:
    sealed = random_batch(5)
    batch = assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE)
    scores_T = np.random.default_rng(1).uniform(0, 1, batch.samples.ids_T.size)
    return batch.with_columns(token_columns={"step_scores": scores_T})


def test_the_figures_of_a_batch_are_over_its_trajectories() -> None:
    batch = scored_batch()
    samples, scores_T = batch.samples, batch.token_columns["step_scores"]
    by_row: dict[int, dict[int, float]] = {}
    for token in np.flatnonzero(samples.mask_T):
        row, turn = int(batch.rows_T[token]), int(samples.turns_T[token])
        by_row.setdefault(row, {})[turn] = float(scores_T[token])  # the last token's counts
    rewards = batch.row_columns["reward"]
    rows = [row for row in by_row if np.isfinite(rewards[row])]
    means = np.array([np.mean([*by_row[row].values()]) for row in rows])
    outcomes = rewards[rows]
    found = score_metrics(batch, SingleRank())
    assert found["process/rows"] == len(rows)
    assert found["process/score"] == pytest.approx(means.mean())
    assert found["process/outcome"] == pytest.approx(outcomes.mean())
    assert found["process/correlation"] == pytest.approx(np.corrcoef(means, outcomes)[0, 1])
    watch = HackingWatch().updated(found).current
    assert watch.correlation == pytest.approx(found["process/correlation"])


def test_a_batch_without_step_scores_has_no_such_figures() -> None:
    sealed = random_batch(5)
    assert (
        score_metrics(assemble(sealed.manifest, sealed.rows, POLICY, VOCAB_SIZE), SingleRank())
        == {}
    )
