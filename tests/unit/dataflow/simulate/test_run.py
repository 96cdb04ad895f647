# SPDX-License-Identifier: Apache-2.0
"""A recorded run simulated with the same rules repeats its decisions; other rules are counted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.unit.dataflow.simulate.recorded_runs import PICKY, VANILLA, Rules, config, record

from penstock.dataflow.ledger.recorded import RecordedRun, open_recorded_run
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import (
    BatchRecord,
    DecisionRecord,
    FateRecord,
    GroupRecord,
    GroupState,
)
from penstock.dataflow.service.build import core_spec
from penstock.dataflow.simulate.figures import count_totals, recorded_totals
from penstock.dataflow.simulate.run import SimulatedSource, SimulationResult, simulate


def decisions(tables: Tables) -> dict[str, list[Any]]:
    """All decisions, without their times."""
    return {
        "issued": [
            replace(r, issued_at=0.0, ended_at=0.0, state=GroupState.OPEN, reason="")
            for r in _sorted(tables.read(GroupRecord), "issue")
        ],
        "skipped": [replace(r, at=0.0) for r in _sorted(tables.read(DecisionRecord), "number")],
        "fates": [
            structs.replace(r, at=0.0, state=str(r.state))
            for r in _sorted(tables.read(FateRecord), "group_id")
        ],
        "batches": [
            (r.seq, r.digest, r.trains_from, r.num_replayed)
            for r in _sorted(tables.read(BatchRecord), "seq")
        ],
    }


def _sorted(records: list[Any], field: str) -> list[Any]:
    return sorted(records, key=lambda record: getattr(record, field))


def recorded_run(folder: Path, rules: Rules, steps: int = 12) -> RecordedRun:
    asyncio.run(record(folder, rules, steps=steps))
    return open_recorded_run(folder / "ledger")


def replayed(
    folder: Path, recorded: RecordedRun, rules: Rules, steps: int = 12
) -> SimulationResult:
    run = config(folder, rules, steps=steps)
    return simulate(
        recorded, core_spec(run), [SimulatedSource(name="train", weight=1.0, limit=None)]
    )


@pytest.mark.parametrize("rules", [VANILLA, PICKY], ids=["vanilla", "picky"])
def test_the_same_rules_decide_exactly_as_recorded(tmp_path: Path, rules: Rules) -> None:
    recorded = recorded_run(tmp_path, rules)
    simulated = replayed(tmp_path, recorded, rules)
    was, would_be = decisions(recorded.coordinator), decisions(simulated.tables)
    assert was["fates"] and was["batches"]
    for kind, found in was.items():
        assert would_be[kind] == found, kind
    assert recorded_totals(recorded) == count_totals(
        simulated.tables, simulated.rows, simulated.unknown
    )
    assert not simulated.unknown and not simulated.num_unfilled_batches


def test_stricter_rules_show_rejected_groups(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path, VANILLA)
    simulated = replayed(tmp_path, recorded, ({"admit": "reward-spread"},))
    figures = count_totals(simulated.tables, simulated.rows, simulated.unknown)
    [policy] = figures.policies.values()
    refused = policy.wasted["uniform_reward"]
    assert refused.groups > policy.trained.groups, "two thirds of the tasks never differ"
    assert refused.rows == refused.tokens == 2 * refused.groups, "each row has one token"
    assert simulated.num_unfilled_batches > 0, "the recorded tasks cannot fill all batches"
    for batch in simulated.tables.read(BatchRecord):
        assert batch.reward_mean not in (0.0, 1.0)
        assert batch.num_groups == 3, "the end of the record is not the end of the tasks"


def test_tasks_that_were_never_rolled_out_are_unknown(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path, PICKY)
    num_skipped = recorded.coordinator.scalar(
        "SELECT count(*) FROM decisions WHERE verdict = 'skipped'"
    )
    assert num_skipped > 0
    simulated = replayed(tmp_path, recorded, VANILLA)
    figures = count_totals(simulated.tables, simulated.rows, simulated.unknown)
    assert 0 < figures.unknown <= num_skipped
    issued = simulated.tables.scalar("SELECT count(*) FROM groups")
    assert figures.issued + figures.unknown == issued
    [policy] = figures.policies.values()
    assert policy.wasted.get("remainder") is None or policy.wasted["remainder"].rows > 0


def test_replay_trains_the_same_steps_from_fewer_groups(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path, VANILLA)
    replay: Rules = ({"replay": "newest", "ratio": 0.5, "max_uses": 2, "max_staleness": 4},)
    simulated = replayed(tmp_path, recorded, replay)
    before = recorded_totals(recorded)
    after = count_totals(simulated.tables, simulated.rows, simulated.unknown)
    [old], [new] = before.policies.values(), after.policies.values()
    assert new.batches == old.batches and simulated.num_unfilled_batches == 0
    assert new.trained.groups < old.trained.groups
    assert new.replayed.groups == old.trained.groups - new.trained.groups


def test_a_run_that_ends_earlier_counts_only_earlier_data(tmp_path: Path) -> None:
    recorded = recorded_run(tmp_path, PICKY)
    simulated = replayed(tmp_path, recorded, PICKY, steps=6)
    cut = simulated.tables.read(FateRecord, "reason = 'remainder'")
    assert cut, "some groups were in progress when the last step was committed"
    whole = {fate.group_id: 2 for fate in cut}
    assert {fate.group_id: simulated.rows[fate.group_id] for fate in cut} != whole
