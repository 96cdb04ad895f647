# SPDX-License-Identifier: Apache-2.0
"""The service in process, where a test can hold its disk or break its sources."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.contract.dataflow_server import POLICY, small_config, trajectory

from penstock.config import RuleConfig, StageConfig
from penstock.dataflow.columns.row_leases import LeasedRow, LeaseOutcome
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.records import Record
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.operators.status import status
from penstock.dataflow.service.rows.messages import ResultsRequest, RowLeaseRequest, RowResult
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.tasks import reverse
from penstock.types import NodeId

NODE = NodeId("n0")
LIVE = LiveVersion(policy=POLICY, incarnation=1, number=0)


def incarnation(request_id: str) -> IncarnationRequest:
    return IncarnationRequest(request_id=request_id, expected=0, number=0, seq=0)


async def start(service: DataflowService) -> None:
    await service.trainers.incarnate(POLICY, incarnation("r"))
    await service.trainers.publish(
        POLICY,
        PublishRequest(incarnation=1, number=0, manifest_digest="m", weights_digest="w"),
    )
    await service.nodes.register(
        RegisterRequest(node_id=NODE, boot_id="s", capacity=64, policies=())
    )
    await service.nodes.heartbeat(NODE, Heartbeat(boot_id="s", state=NodeState.LIVE, live=(LIVE,)))


def lease(request_id: str) -> LeaseRequest:
    return LeaseRequest(
        request_id=request_id, node_id=NODE, boot_id="s", max_slots=64, wait_s=0, live=(LIVE,)
    )


async def test_a_source_that_raises_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for the next task in the very call that delivers rows."""
    real, is_broken = reverse.make_task, False

    def make_task(ordinal: int, seed: int) -> dict[str, Any]:
        if is_broken:
            raise OSError("the data set is away")
        return real(ordinal, seed)

    monkeypatch.setattr(reverse, "make_task", make_task)
    config = small_config(groups_per_batch=1, steps=9)
    rules = {"rules": (RuleConfig(admit="reward-spread"),)}
    flow = config.dataflow.model_copy(update=rules)
    service = build(config.model_copy(update={"dataflow": flow}), tmp_path)
    await start(service)
    grants = (await service.nodes.lease(lease("a"))).grants
    is_broken = True
    first = grants[0].group_id  # its rewards differ; the other group is dropped, so room appears
    payloads = [
        trajectory(grant, NODE, LIVE, reward=0.1 * grant.slot if grant.group_id == first else 0.5)
        for grant in grants
    ]
    body = DeliveryRequest(node_id=NODE, boot_id="s", deliveries=tuple(payloads))
    answer = await service.nodes.deliver(body)
    assert {result.status for result in answer.results} == {DeliveryStatus.STORED}
    batch = await service.trainers.batch(BatchRequest(consumer=POLICY, seq=1, incarnation=1))
    assert batch.manifest is not None and "data set is away" in service.source_error
    is_broken = False
    await service.tick()
    assert service.coordinator.open and not service.source_error, "it goes on when the source does"
    rows = await service.trainers.rows(POLICY, 1)
    for row, summary in zip(rows.rows, batch.manifest.rows, strict=True):
        assert row.payload is not None and blake3(row.payload).hexdigest() == summary.digest
    service.close()


async def test_a_repeated_answer_is_as_durable_as_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = build(small_config(), tmp_path)
    disk, commit = threading.Event(), service.process.ledger.tables.commit

    def slow(records: Sequence[Record]) -> None:
        disk.wait(60)
        commit(records)

    monkeypatch.setattr(service.process.ledger.tables, "commit", slow)
    first = asyncio.create_task(service.trainers.incarnate(POLICY, incarnation("r")))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(service.trainers.incarnate(POLICY, incarnation("r")))
    await asyncio.sleep(0.2)
    assert not first.done() and not second.done(), "nothing is on disk yet"
    disk.set()
    assert await first == await second
    service.close()


async def test_the_wait_for_a_live_node_counts_from_the_last_one(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    began_at = service.process.clock()
    service.process.clock = lambda: began_at + 100.0
    await start(service)
    assert "a live rollout node" not in {wait.on for wait in status(service, "r").waiting}
    service.partition.nodes[NODE].is_expired = True
    service.process.clock = lambda: began_at + 107.0
    waits = {wait.on: wait.since_s for wait in status(service, "r").waiting}
    assert waits["a live rollout node"] == pytest.approx(7.0, abs=0.2)
    service.close()


async def test_a_column_that_comes_with_the_last_row_of_its_group_counts(tmp_path: Path) -> None:
    """In the very turn in which the group ends, it is neither open nor reported yet."""
    stage = StageConfig(name="reward", reads=("turns",), writes=("reward",), ttl_s=60.0)
    config = small_config(groups_per_batch=1, num_generations=2)
    flow = config.dataflow.model_copy(update={"stages": (stage,)})
    service = build(config.model_copy(update={"dataflow": flow, "reward": None}), tmp_path)
    ask = RowLeaseRequest(request_id="a", worker="w", max_rows=1, wait_s=0.0)
    await service.rows.lease("reward", ask)  # a policy whose stage has no worker gets no work
    await start(service)
    await service.tick()
    first, last = (await service.nodes.lease(replace(lease("a"), max_slots=2))).grants
    assert first.group_id == last.group_id

    async def deliver(grant: Grant) -> None:
        row = trajectory(grant, NODE, LIVE, reward=None)
        await service.nodes.deliver(DeliveryRequest(node_id=NODE, boot_id="s", deliveries=(row,)))

    async def score(leased: LeasedRow) -> None:
        result = RowResult(claim=leased.claim, columns={"reward": 1.0}, end=LeaseOutcome.DONE)
        await service.rows.record(ResultsRequest(reader="reward", worker="w", results=(result,)))

    async def next_row(request_id: str) -> LeasedRow:
        return (await service.rows.lease("reward", replace(ask, request_id=request_id))).rows[0]

    await deliver(first)
    row = await next_row("b")
    await asyncio.gather(deliver(last), score(row))
    await score(await next_row("c"))
    batch = await service.trainers.batch(BatchRequest(consumer=POLICY, seq=1, incarnation=1))
    assert batch.manifest is not None and len([*batch.manifest.rows]) == 2
    service.close()
