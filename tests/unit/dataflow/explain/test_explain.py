# SPDX-License-Identifier: Apache-2.0
"""Every kind of id is explained from the ledger alone, with the ledger's figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.local_run import LocalNode, LocalTrainer
from tests.unit.audit.ledgers import eventful_run
from tests.unit.dataflow.simulate.recorded_runs import PICKY, POLICY, config, record, reward

from penstock.dataflow.explain.explain import Explanation, explain
from penstock.dataflow.ledger.recorded import RecordedRun, open_recorded_run
from penstock.dataflow.records import (
    BatchRecord,
    DecisionRecord,
    FateRecord,
    GroupRecord,
)
from penstock.dataflow.service.build import build
from penstock.errors import NotFound, StoreError
from penstock.types import Manifest
from penstock.wire.codec import decode


@pytest.fixture(scope="module")
def picky(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRun]:
    """Tasks skipped by GRESO, groups rejected by reward-spread, replayed groups."""
    folder = tmp_path_factory.mktemp("picky")
    asyncio.run(record(folder, PICKY))
    recorded = open_recorded_run(folder / "ledger")
    yield recorded
    recorded.close()


@pytest.fixture(scope="module")
def eventful(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordedRun]:
    """Failures, releases, a replaced node, a restart, a skipped batch and a rewind."""
    folder = tmp_path_factory.mktemp("eventful")
    asyncio.run(eventful_run(folder))
    recorded = open_recorded_run(folder / "ledger")
    yield recorded
    recorded.close()


def texts_of(explanation: Explanation, what: str) -> list[str]:
    return [step.text for step in explanation.steps if step.what == what]


def test_a_skipped_task_names_the_rule_and_its_draw(picky: RecordedRun) -> None:
    skipped = picky.coordinator.read(DecisionRecord, "verdict = 'skipped'")
    key = skipped[0].subject
    found = explain(picky, key)
    times = [one for one in skipped if one.subject == key]
    assert found.kind == "task"
    assert f"skipped {len(times)} time" in found.summary and "greso" in found.summary
    draw = json.loads(times[0].detail)["draws"][0]
    assert f"it drew {draw:.4f}" in texts_of(found, "skipped")[0]
    assert texts_of(found, "remembered"), "what GRESO remembers of this task is part of the answer"
    assert explain(picky, key[:12]) == found, "the beginning of a key is enough"


def test_the_next_group_says_what_was_skipped_before_it(picky: RecordedRun) -> None:
    after_skips = [
        one for one in picky.coordinator.read(GroupRecord) if json.loads(one.why)["skipped"] > 0
    ]
    one = after_skips[0]
    [text] = texts_of(explain(picky, one.group_id), "issued")
    num = json.loads(one.why)["skipped"]
    assert f"{num} task" in text and "skipped by greso" in text


def test_a_rejected_group_names_rule_reason_and_rewards(picky: RecordedRun) -> None:
    fate = picky.coordinator.read(FateRecord, "reason = 'uniform_reward'")[0]
    found = explain(picky, fate.group_id)
    [text] = texts_of(found, "dropped")
    assert "by rule reward-spread: uniform_reward, all members earned the same" in text
    rewards = picky.coordinator.rows("SELECT reward FROM rows WHERE group_id = :g", g=fate.group_id)
    assert f"rewards {', '.join(f'{r:g}' for (r,) in rewards)}" in text
    assert f"{fate.tokens} tokens wasted" in text


def test_a_replayed_group_lists_every_batch(picky: RecordedRun) -> None:
    fate = max(picky.coordinator.read(FateRecord, "uses > 1"), key=lambda one: one.uses)
    batches = [
        f"policy.{batch.seq}"
        for batch in sorted(picky.coordinator.read(BatchRecord), key=lambda one: one.seq)
        if any(g.group_id == fate.group_id for g in decode(batch.manifest, Manifest).groups)
    ]
    assert len(batches) == fate.uses
    steps = [step for step in explain(picky, fate.group_id).steps if step.what == "sealed"]
    assert [step.facts["batch"] for step in steps] == batches
    assert "the replay rule" in steps[-1].text


def test_a_batch_says_who_chose_its_groups(picky: RecordedRun) -> None:
    batch = max(picky.coordinator.read(BatchRecord), key=lambda one: one.num_replayed)
    found = explain(picky, f"policy.{batch.seq}")
    [step] = [step for step in found.steps if step.what == "sealed"]
    assert "select rule" in step.text and "the replay rule added" in step.text
    groups = decode(batch.manifest, Manifest).groups
    assert [one["group"] for one in step.facts["groups"]] == [g.group_id for g in groups]
    assert max(one["staleness"] for one in step.facts["groups"]) == batch.staleness_max
    assert texts_of(found, "trained") == [
        f"batch policy.{batch.seq} trained, producing version policy@1.{batch.seq}"
    ]


def test_the_select_rule_is_named(eventful: RecordedRun) -> None:
    texts = [texts_of(explain(eventful, f"policy.{seq}"), "sealed")[0] for seq in range(1, 6)]
    assert all("select rule edf took 3 groups" in text for text in texts)


def test_staleness_is_as_of_sealing(eventful: RecordedRun) -> None:
    """A later incarnation makes tokens older, but does not change sealed batches."""
    for batch in eventful.coordinator.read(BatchRecord):
        [step] = [s for s in explain(eventful, f"policy.{batch.seq}").steps if s.what == "sealed"]
        ages = [group["staleness"] for group in step.facts["groups"]]
        assert max(ages) == batch.staleness_max, batch.seq


def test_failed_attempts_and_failed_slots_are_listed(eventful: RecordedRun) -> None:
    found = explain(eventful, "p0-2")
    assert "failed_slots" in found.summary
    leases = [step for step in found.steps if step.what == "leased" and step.facts["slot"] == 1]
    assert [step.facts["ended"] for step in leases] == ["failed"] * 3
    assert texts_of(found, "given up") and "3 of 4 members" in texts_of(found, "dropped")[0]


def test_a_row_of_a_lost_attempt_has_no_part_in_the_batch(eventful: RecordedRun) -> None:
    lost, kept = explain(eventful, "p0-3.0.1"), explain(eventful, "p0-3.0.2")
    assert "has no result" in lost.summary and not texts_of(lost, "sealed")
    assert "went into batch policy.1" in kept.summary and texts_of(kept, "published")


def test_a_batch_trained_and_then_skipped_by_its_successor(eventful: RecordedRun) -> None:
    found = explain(eventful, "policy.4")
    assert "policy@1.4" in found.summary and "loss is not finite" in found.summary
    assert [step.at for step in found.steps] == sorted(step.at for step in found.steps)


def test_versions_know_their_batch_or_fork(eventful: RecordedRun) -> None:
    assert "came from batch policy.3" in explain(eventful, "policy@1.3").summary
    assert "restore point of incarnation 2" in explain(eventful, "policy@2.2").summary
    assert "initial model" in explain(eventful, "policy@1.0").summary
    assert explain(eventful, "policy@3").summary.startswith("version policy@2.3")


@pytest.mark.parametrize(
    "id", ["p0-9999", "p0-1.7.1", "policy.99", "other.1", "policy@1.99", "ffff", "", "%", "a b'--"]
)
def test_an_unknown_id_is_an_error_that_names_known_ones(eventful: RecordedRun, id: str) -> None:
    with pytest.raises(NotFound, match="no such"):
        explain(eventful, id)


def test_reading_changes_nothing(eventful: RecordedRun, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no ledger"):
        open_recorded_run(tmp_path)
    assert not [*tmp_path.iterdir()], "a missing ledger is not created"


async def test_a_ledger_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    service = build(config(tmp_path, PICKY), tmp_path / "ledger")
    trainer, node = LocalTrainer(service, POLICY), LocalNode(service, reward)
    await trainer.take_over()
    await node.join()
    await node.work(max_slots=4)
    recorded = open_recorded_run(tmp_path / "ledger")
    assert "initial model" in explain(recorded, "policy@1.0").summary
    assert "closed" in {step.what for step in explain(recorded, "p0-1").steps}
    await node.work(max_slots=4)
    assert texts_of(explain(recorded, "p0-3"), "leased"), (
        "what came after it was opened is seen too"
    )
    recorded.close()
    service.close()
