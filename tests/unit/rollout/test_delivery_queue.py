# SPDX-License-Identifier: Apache-2.0
"""Deliveries that the dataflow refuses: a row that cannot be stored costs itself and no other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from penstock.dataflow.core.leasing import DeliveryStatus, RegisterRequest
from penstock.dataflow.service.nodes.messages import (
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
    Heartbeat,
    HeartbeatAnswer,
    RegisterAnswer,
)
from penstock.errors import BadRequest, TooLarge, Unauthorized, WireError
from penstock.rollout import delivery_queue as module
from penstock.rollout.delivery_queue import AckLog, DeliveryQueue
from penstock.rollout.membership import Membership, NodeOrders
from penstock.types import (
    FinishReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    ToolUse,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import decode, encode

NODE = NodeId("n")
ROWS = [RowId(f"p0-1.{slot}.1") for slot in range(4)]
RELEASED = RowId("p0-2.0.1")
MANY_CALLS = 100


class Dataflow:
    """Keeps rows, and raises what its test wants instead."""

    def __init__(self, refuse: Callable[[DeliveryRequest], WireError | None]) -> None:
        self.refuse = refuse
        self.stored: dict[RowId, Trajectory] = {}
        self.released: list[RowId] = []
        self.num_calls = 0

    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer:
        self.num_calls += 1
        assert self.num_calls < MANY_CALLS, "it repeats itself"
        if (error := self.refuse(body)) is not None:
            raise error
        self.stored |= {one.row_id: decode(one.payload, Trajectory) for one in body.deliveries}
        self.released += body.released
        results = [
            DeliveryResult(row_id=row_id, status=DeliveryStatus.STORED)
            for row_id in (*(one.row_id for one in body.deliveries), *body.released)
        ]
        return DeliveryAnswer(results=tuple(results))

    async def register(self, body: RegisterRequest) -> RegisterAnswer:
        raise AssertionError

    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> HeartbeatAnswer:
        raise AssertionError

    async def leave(self, node_id: NodeId, boot_id: str) -> None:
        raise AssertionError


@asynccontextmanager
async def delivering(
    api: Dataflow, acks: Path
) -> AsyncGenerator[tuple[DeliveryQueue, asyncio.Task[None]]]:
    membership = Membership(api, NodeOrders(), node_id=NODE, capacity=4)
    ack_log = AckLog(acks)
    queue = DeliveryQueue(api, membership, ack_log)
    loop = asyncio.create_task(queue.deliver())
    try:
        yield queue, loop
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        ack_log.close()


async def empty(queue: DeliveryQueue, loop: asyncio.Task[None]) -> None:
    """Until nothing waits, or the loop has ended; then its error."""
    waiting = asyncio.create_task(queue.wait_until_at_most(0))
    await asyncio.wait({waiting, loop}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if loop.done():
        loop.result()


def row(row_id: RowId, schema: str = "") -> Trajectory:
    turn = Turn(
        policy=PolicyName("policy"),
        parent=-1,
        prompt_ids=token_ids([1, 2]),
        sampled_ids=token_ids([3]),
        logprobs=log_probs([-0.5]),
        spans=(VersionSpan(start=0, end=1, incarnation=1, number=0),),
        sampling=SamplingSpec(json_schema=schema),
        finish=FinishReason.STOP,
    )
    group, slot, epoch = row_id.split(".")
    return Trajectory(
        row_id=row_id,
        group_id=GroupId(group),
        slot=int(slot),
        epoch=int(epoch),
        attempt=2,
        node_id=NODE,
        turns=(turn,),
        reward=0.5,
        role_rewards={"judge": 1.0},
        tool_uses=(ToolUse(turn=0, name="n", arguments="{}", result="r"),),
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
        started_at=1.0,
        ended_at=2.0,
    )


def put_all(queue: DeliveryQueue) -> None:
    """Four rows, of which the second is large, and a released slot: one call."""
    for index, row_id in enumerate(ROWS):
        queue.put(row(row_id, "x" * 5_000 if index == 1 else ""), "s")
    queue.release(RELEASED, "s")


def is_large(body: DeliveryRequest) -> bool:
    return any(len(one.payload) > 5_000 for one in body.deliveries)


def require_failed(found: Trajectory, why: str) -> None:
    assert found.outcome.kind is OutcomeKind.FAILED and why in found.outcome.detail
    assert found.reward is None
    assert not (found.turns or found.role_rewards or found.tool_uses)
    assert (found.attempt, found.node_id, found.started_at, found.ended_at) == (2, NODE, 1.0, 2.0)
    assert found.row_id == f"{found.group_id}.{found.slot}.{found.epoch}"
    assert found.boot_id


@pytest.mark.parametrize("error", [TooLarge("268500000 bytes"), BadRequest("268500000 bytes")])
async def test_a_refused_row_fails_alone(tmp_path: Path, error: WireError) -> None:
    api = Dataflow(lambda body: error if is_large(body) else None)
    with structlog.testing.capture_logs() as lines:
        async with delivering(api, tmp_path / "acks") as (queue, loop):
            put_all(queue)
            await empty(queue, loop)
            assert not loop.done()
            queue.put(row(RowId("p0-3.0.1")), "s")
            await empty(queue, loop)
    for row_id in (ROWS[0], ROWS[2], ROWS[3]):
        assert api.stored[row_id].turns == row(row_id).turns
    require_failed(api.stored[ROWS[1]], "268500000 bytes")
    assert api.released == [RELEASED] and RowId("p0-3.0.1") in api.stored
    assert set((tmp_path / "acks").read_text().split()) == set(api.stored)
    [warning] = [line for line in lines if line["log_level"] == "warning"]
    assert warning["row"] == ROWS[1] and "268500000 bytes" in warning["why"] and warning["fix"]


async def test_a_row_whose_failure_is_refused_too_is_released(tmp_path: Path) -> None:
    """Else its lease would last as long as the node."""

    def refuse(body: DeliveryRequest) -> WireError | None:
        is_hated = any(one.row_id == ROWS[1] for one in body.deliveries)
        return BadRequest("not this one") if is_hated else None

    api = Dataflow(refuse)
    with structlog.testing.capture_logs() as lines:
        async with delivering(api, tmp_path / "acks") as (queue, loop):
            put_all(queue)
            await empty(queue, loop)
    assert api.stored.keys() == {ROWS[0], ROWS[2], ROWS[3]}
    assert api.released == [ROWS[1], RELEASED]
    warnings = [line for line in lines if line["log_level"] == "warning"]
    assert [line["row"] for line in warnings] == [ROWS[1]] * 2
    assert ROWS[1] not in (tmp_path / "acks").read_text()


async def test_a_service_that_refuses_everything_ends_the_node(tmp_path: Path) -> None:
    """Then it is not about a row. Its leases expire, and other nodes do the work again."""
    api = Dataflow(lambda body: TooLarge("anything"))
    async with delivering(api, tmp_path / "acks") as (queue, loop):
        put_all(queue)
        with pytest.raises(ExceptionGroup) as ended:
            await empty(queue, loop)
    assert ended.group_contains(TooLarge, match="anything")
    assert api.num_calls == 4, "all together, the first alone, its failure, its release"


async def test_a_call_without_rows_is_not_repeated(tmp_path: Path) -> None:
    api = Dataflow(lambda body: BadRequest("no"))
    async with delivering(api, tmp_path / "acks") as (queue, loop):
        queue.release(RELEASED, "s")
        with pytest.raises(ExceptionGroup) as ended:
            await empty(queue, loop)
    assert ended.group_contains(BadRequest, match="no") and api.num_calls == 1


async def test_other_errors_are_not_about_a_row(tmp_path: Path) -> None:
    api = Dataflow(lambda body: Unauthorized("revoked"))
    async with delivering(api, tmp_path / "acks") as (queue, loop):
        put_all(queue)
        with pytest.raises(ExceptionGroup) as ended:
            await empty(queue, loop)
    assert ended.group_contains(Unauthorized) and api.num_calls == 1


async def test_a_row_above_the_limit_is_never_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its upload would stay in the node's quota of blobs that no row refers to."""
    monkeypatch.setattr(module, "MAX_ROW_BYTES", len(encode(row(ROWS[1], "x" * 4_000))))
    api = Dataflow(lambda body: Unauthorized("a large row was sent") if is_large(body) else None)
    with structlog.testing.capture_logs() as lines:
        async with delivering(api, tmp_path / "acks") as (queue, loop):
            put_all(queue)
            await empty(queue, loop)
    assert api.stored.keys() == set(ROWS) and api.num_calls == 1
    require_failed(api.stored[ROWS[1]], "bytes")
    assert [line["row"] for line in lines if line["log_level"] == "warning"] == [ROWS[1]]
