# SPDX-License-Identifier: Apache-2.0
"""Turns of a running attempt over HTTP: reported under a lease, offered to the next holder of the
slot."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.contract.dataflow_server import FakeTrainer, dataflow, small_config, trajectory
from tests.contract.test_dataflow_http import SmallNode

from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import (
    DeliveryRequest,
    RecordedTurn,
    RecordRequest,
)
from penstock.errors import BadRequest, Fenced
from penstock.types import (
    FailureKind,
    Outcome,
    OutcomeKind,
    Trajectory,
    Turn,
    log_probs,
)
from penstock.wire.codec import encode


def record_of(grant: Grant, node: SmallNode) -> Trajectory:
    delivery = trajectory(grant, node.node_id, node.live)
    return msgspec.msgpack.decode(delivery.payload, type=Trajectory)


async def tell(node: SmallNode, grant: Grant, *turns: Turn, is_reused: bool = False) -> None:
    told = [
        RecordedTurn(
            row_id=grant.row_id, index=index, turn=turn, is_reused=is_reused, secret=grant.secret
        )
        for index, turn in enumerate(turns)
    ]
    body = RecordRequest(node_id=node.node_id, turns=tuple(told))
    await node.client.record(body, deadline_s=60.0)


async def offered(node: SmallNode, grant: Grant) -> tuple[Turn, ...]:
    return await node.client.recorded(node.node_id, grant.row_id, grant.secret, deadline_s=60.0)


async def fail(node: SmallNode, grant: Grant, kind: FailureKind) -> None:
    outcome = Outcome(kind=OutcomeKind.FAILED, reason=kind, detail="planted")
    record = replace(record_of(grant, node), reward=None, outcome=outcome)
    delivery = replace(
        trajectory(grant, node.node_id, node.live), payload=memoryview(encode(record))
    )
    body = DeliveryRequest(node_id=node.node_id, boot_id=node.boot_id, deliveries=(delivery,))
    await node.client.deliver(body)


async def test_the_next_holder_continues_from_the_turns_of_the_last(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config()) as running:
        await asyncio.to_thread(FakeTrainer, running)
        one, two = SmallNode(running, "one"), SmallNode(running, "two")
        await one.join()
        await two.join()
        [grant] = (await one.client.lease(one.request(1))).grants
        assert not grant.num_recorded and not await offered(one, grant)
        [turn] = record_of(grant, one).turns
        await tell(one, grant, turn, turn)
        await tell(one, grant, turn, turn)  # a repeated call changes nothing
        await tell(two, grant, turn, turn, turn)  # not its lease
        with pytest.raises(Fenced):
            await offered(two, grant)
        await one.client.leave(one.node_id, one.boot_id)
        found = {(g.group_id, g.slot): g for g in (await two.client.lease(two.request())).grants}
        again = found[grant.group_id, grant.slot]
        assert (again.epoch, again.num_recorded) == (2, 2)
        assert sum(g.num_recorded for g in found.values()) == 2
        assert await offered(two, again) == (turn, turn)
        await tell(two, again, turn, turn, is_reused=True)
        status = await asyncio.to_thread(running.reader().status)
        assert status.salvaged_tokens == 4
        await one.client.close()
        await two.client.close()


@pytest.mark.parametrize(("kind", "num_left"), [(FailureKind.ENGINE, 1), (FailureKind.WORKFLOW, 0)])
async def test_only_engine_failures_are_continued(
    tmp_path: Path, kind: FailureKind, num_left: int
) -> None:
    with dataflow(tmp_path, small_config()) as running:
        await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()
        [grant] = (await node.client.lease(node.request(1))).grants
        await tell(node, grant, *record_of(grant, node).turns)
        await fail(node, grant, kind)
        [again] = (await node.client.lease(node.request(1))).grants
        assert (again.slot, again.attempt, again.num_recorded) == (grant.slot, 2, num_left)
        await node.client.close()


async def test_a_turn_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config()) as running:
        await asyncio.to_thread(FakeTrainer, running)
        node = SmallNode(running)
        await node.join()
        [grant] = (await node.client.lease(node.request(1))).grants
        [turn] = record_of(grant, node).turns
        with pytest.raises(BadRequest, match="log-prob"):
            await tell(node, grant, replace(turn, logprobs=log_probs([float("nan"), 0.0])))
        await node.client.close()
