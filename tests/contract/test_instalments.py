# SPDX-License-Identifier: Apache-2.0
"""Batches sealed in instalments, by the service in process: durable, in order, the same for every
trainer that asks, and audited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from tests.unit.audit.ledgers import (
    POLICY,
    Choose,
    Run,
    always_completed,
    small_config,
    some_failures,
)
from tests.unit.audit.tampering import change, insert
from tests.unit.audit.tampering import fetch_record as fetch

from penstock.audit import audit
from penstock.config import RunConfig, SourceConfig
from penstock.dataflow.records import BatchRecord, InstalmentRecord, Record
from penstock.dataflow.service.trainers.messages import BatchAnswer
from penstock.errors import BadRequest, Conflict, NotFound
from penstock.wire.codec import encode

NUM_SLOTS = 4
"""Of a group."""


def streamed_config(*, groups_per_batch: int = 3, limit: int | None = None) -> RunConfig:
    config = small_config()
    training = config.training.model_copy(
        update={"stream": True, "minibatches": 1, "groups_per_batch": groups_per_batch}
    )
    algorithm = config.algorithm.model_copy(update={"aggregation": "fixed-constant"})
    [source] = config.sources
    limited = SourceConfig.model_validate(source.model_dump() | {"limit": limit})
    return config.model_copy(
        update={"training": training, "algorithm": algorithm, "sources": (limited,)}
    )


async def started(folder: Path, config: RunConfig | None = None) -> Run:
    run = Run(folder / "run", config or streamed_config(), choose=always_completed)
    await run.start()
    return run


async def next_instalment(run: Run, number: int) -> BatchAnswer:
    """After as little work as it needs."""
    for _ in range(100):
        answer = await run.trainer.instalment(number)
        if answer.manifest is not None or answer.end:
            return answer
        assert await run.nodes[0].work(NUM_SLOTS)
    raise AssertionError("no instalment after 100 groups")


async def stream_batch(run: Run) -> list[BatchAnswer]:
    """Every instalment of the next batch."""
    found = [await next_instalment(run, 1)]
    while not found[-1].is_last:
        found.append(await next_instalment(run, len(found) + 1))
    return found


def names(answer: BatchAnswer) -> list[str]:
    assert answer.manifest is not None
    return [group.group_id for group in answer.manifest.groups]


async def test_groups_come_as_they_are_admitted_and_are_the_batch(tmp_path: Path) -> None:
    run = await started(tmp_path)
    parts = await stream_batch(run)
    assert [len(names(part)) for part in parts] == [1, 1, 1]
    assert [part.is_last for part in parts] == [False, False, True]
    whole = await run.trainer.batch()
    assert whole is not None and whole.trains_from == 0
    assert [group.group_id for group in whole.groups] == [n for part in parts for n in names(part)]
    await run.trainer.commit()
    tables = run.service.process.ledger.tables
    [record] = tables.read(BatchRecord)
    assert (record.num_groups, record.num_rows, record.staleness_max) == (3, 12, 0)
    run.close()
    report = audit(tmp_path / "run")
    assert report.ok, "\n".join(report.lines())
    assert next(check for check in report.checks if check.name == "instalments").num_examined == 3


async def test_an_instalment_is_served_only_when_it_is_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = await started(tmp_path)
    await run.nodes[0].work(NUM_SLOTS)
    tables = run.service.process.ledger.tables
    disk, seen, commit = threading.Event(), asyncio.Event(), tables.commit
    loop = asyncio.get_running_loop()

    def slow(records: Sequence[Record]) -> None:
        if any(isinstance(record, InstalmentRecord) for record in records):
            loop.call_soon_threadsafe(seen.set)
            disk.wait(60)
        commit(records)

    monkeypatch.setattr(tables, "commit", slow)
    first = asyncio.create_task(run.trainer.instalment(1))
    await asyncio.wait_for(seen.wait(), 60)
    second = asyncio.create_task(run.trainer.instalment(1))
    rows = asyncio.create_task(run.service.trainers.wanted(POLICY, 1, None, 1))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not first.done() and not second.done() and not rows.done(), "it is not on disk yet"
    disk.set()
    assert names(await first) == names(await second)
    assert len((await rows).row_ids) == NUM_SLOTS
    run.close()


@pytest.mark.parametrize("num_before", [1, 2, 3])
async def test_a_killed_service_and_trainer_go_on_with_the_same_instalments(
    tmp_path: Path, num_before: int
) -> None:
    run = await started(tmp_path)
    await stream_batch(run)
    await run.trainer.commit()
    for node in run.nodes:
        await node.load()
    before = [await next_instalment(run, number + 1) for number in range(num_before)]
    run.restart_service()
    for node in run.nodes:
        node.boot_id = "second"
        await node.join()
    await run.trainer.incarnate(0, 0)  # a checkpoint before the batch that was committed
    assert [len(names(part)) for part in await stream_batch(run)] == [1, 1, 1]
    await run.trainer.commit()
    again = await stream_batch(run)
    for old, new in zip(before, again, strict=False):
        assert (old.digest, names(old), old.is_last) == (new.digest, names(new), new.is_last)
        assert new.manifest is not None
        assert blake3(encode(new.manifest)).hexdigest() == new.digest
    assert sum(len(names(part)) for part in again) == 3
    await run.trainer.commit()
    for _ in range(2):
        for node in run.nodes:
            await node.load()
        await stream_batch(run)
        await run.trainer.commit()
    run.close()
    report = audit(tmp_path / "run")
    assert report.ok, "\n".join(report.lines())
    assert report.summary.trained_twice == 0 == report.summary.lost


async def test_an_open_batch_is_audited_too(tmp_path: Path) -> None:
    run = await started(tmp_path)
    await next_instalment(run, 1)
    consumer = run.service.coordinator.consumer(POLICY)
    levels = consumer.levels()
    run.restart_service()
    restored = run.service.coordinator.consumer(POLICY)
    assert (restored.levels(), restored.sealed) == (levels, {1: 1})
    assert not run.service.coordinator.has_ended(restored)
    run.close()
    folder = tmp_path / "run"
    report = audit(folder)
    assert report.ok, "\n".join(report.lines())
    twice = fetch(folder, "instalments", "instalment = 1") | {"instalment": 2}
    insert(folder, "instalments", twice)
    assert [check.name for check in audit(folder).checks if not check.ok] == ["instalments"]
    change(folder, "DELETE FROM instalments")
    assert [check.name for check in audit(folder).checks if not check.ok] == ["groups"]


async def test_the_rows_of_an_instalment_are_its_groups(tmp_path: Path) -> None:
    run = await started(tmp_path)
    first = await next_instalment(run, 1)
    with pytest.raises(NotFound, match=r"instalment 2 of batch policy\.1 is not sealed"):
        await run.service.trainers.wanted(POLICY, 1, None, 2)
    with pytest.raises(NotFound, match=r"batch policy\.1 is not sealed"):
        await run.service.trainers.wanted(POLICY, 1)
    with pytest.raises(Conflict, match="the next one is 2 of 1"):
        await run.trainer.instalment(3)
    wanted = await run.service.trainers.wanted(POLICY, 1, None, 1)
    assert first.manifest is not None
    assert wanted.row_ids == [row.row_id for row in first.manifest.rows]
    run.close()


@pytest.mark.parametrize(("choose", "sizes"), [(always_completed, [1, 1]), (some_failures, [1, 0])])
async def test_a_batch_at_the_end_of_the_tasks_is_shorter(
    tmp_path: Path, choose: Choose, sizes: list[int]
) -> None:
    """If the last group is lost, the last instalment is empty."""
    run = Run(tmp_path / "run", streamed_config(limit=2), choose=choose)
    await run.start()
    parts = await stream_batch(run)
    assert [len(names(part)) for part in parts] == sizes
    await run.trainer.commit()
    assert (await run.trainer.instalment(1)).end
    run.close()
    assert audit(tmp_path / "run").ok


async def test_a_complete_batch_and_instalments_of_it_may_be_mixed(tmp_path: Path) -> None:
    """A trainer that does not stream takes over in the middle of a batch; and one that does gets a
    batch that was sealed at once."""
    run = await started(tmp_path)
    first = await next_instalment(run, 1)
    for _ in range(20):
        if whole := await run.trainer.batch():
            break
        await run.nodes[0].work(NUM_SLOTS)
    else:
        raise AssertionError("no batch after 20 groups")
    assert [group.group_id for group in whole.groups][:1] == names(first) and len(whole.groups) == 3
    await run.trainer.commit()
    for node in run.nodes:
        await node.load()
    assert await run.step()
    await run.trainer.incarnate(1, 1)
    second = await run.trainer.instalment(1)
    assert second.is_last and len(names(second)) == 3
    with pytest.raises(NotFound, match="has 0 instalments"):
        await run.trainer.instalment(2)
    run.close()
    assert audit(tmp_path / "run").ok


async def test_a_policy_that_is_not_streamed_has_no_instalments(tmp_path: Path) -> None:
    run = await started(tmp_path, small_config())
    with pytest.raises(BadRequest, match=r"set training\.stream: true"):
        await run.trainer.instalment(1)
    run.close()


async def test_in_lockstep_groups_come_in_the_order_of_issue(tmp_path: Path) -> None:
    """A group that is ready waits for those issued before it; the batch is theirs alone."""
    config = streamed_config().model_copy(update={"deterministic": True})
    run = Run(tmp_path / "run", config, choose=some_failures)  # group 2 fails for good
    await run.start()
    node, other = run.nodes
    await node.lease(NUM_SLOTS)
    for _ in range(3):  # attempts that fail are made again
        await other.work(64)
    assert "p0-3" in run.service.coordinator.consumer(POLICY).ready
    assert (await run.trainer.instalment(1)).manifest is None, "group 1 is running"
    await node.deliver()
    parts = [await run.trainer.instalment(1)]
    while not parts[-1].is_last:
        await other.work(64)
        answer = await run.trainer.instalment(len(parts) + 1)
        parts += [answer] if answer.manifest is not None else []
    assert [name for part in parts for name in names(part)] == ["p0-1", "p0-3"]
    run.close()
    assert audit(tmp_path / "run").ok
