# SPDX-License-Identifier: Apache-2.0
"""A node whose attempts all fail works less, and works fully again after the first success."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
from tests.unit.rollout.fake_dataflow import facts, task
from tests.unit.rollout.polling import eventually
from tests.unit.rollout.test_group_attempt import GRANTS
from tests.unit.rollout.test_node import WORKFLOWS, bench

from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.messages import LeaseAnswer, LeaseRequest, NodeDirectives
from penstock.rollout import slots
from penstock.rollout.delivery_queue import AckLog, DeliveryQueue
from penstock.rollout.membership import Membership, NodeOrders
from penstock.rollout.pinned_engines import OnTrajectory
from penstock.rollout.slots import MAX_DELAY_S, MIN_FAILED, MIN_SLOTS, FailureBackoff
from penstock.types import NodeId, Outcome, OutcomeKind, Task, Trajectory


def test_requests_get_rarer_and_smaller_until_the_first_success() -> None:
    backoff = FailureBackoff()
    for _ in range(MIN_FAILED):
        assert backoff.next_request(256) == (0.0, 256)
        backoff.record(failed=True)
    asked = [backoff.next_request(256) for _ in range(12)]
    assert asked[0] == (0.1, 256) and asked[-1] == (MAX_DELAY_S, MIN_SLOTS)
    assert asked == sorted(asked, key=lambda one: (one[0], -one[1]))
    assert backoff.next_request(3) == (MAX_DELAY_S, 3)
    backoff.record(failed=False)
    assert backoff.next_request(256) == (0.0, 256)


async def test_a_node_does_not_spin_on_attempts_that_fail_at_once(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "MIN_DELAY_S", 0.001)
    failing = facts(workflow=f"{WORKFLOWS}:raises")
    async with bench(tmp_path, snapshot, num_slots=400, capacity=64, run_info=failing) as desk:
        await asyncio.wait_for(desk.dataflow.until_stored(200), 60)
        assert [lease.max_slots for lease in desk.dataflow.leases][:1] == [64]
        assert desk.dataflow.leases[-1].max_slots == MIN_SLOTS


class OneGroup:
    """Leases one group, and attempts it until told which slots are done."""

    def __init__(self) -> None:
        self.has_leased = asyncio.Event()
        self.tellers: list[OnTrajectory] = []
        self.is_cancelled = asyncio.Event()

    async def lease(self, body: LeaseRequest) -> LeaseAnswer:
        if self.has_leased.is_set():
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        self.has_leased.set()
        return LeaseAnswer(tasks=(task(),), grants=tuple(GRANTS), orders=NodeDirectives(wanted=()))

    def runs_together(self, grant: Grant, task: Task) -> bool:
        return True

    async def run(self, grant: Grant, task: Task) -> Trajectory:
        raise AssertionError("not alone")

    async def run_together(self, grants: Sequence[Grant], task: Task, done: OnTrajectory) -> None:
        self.tellers.append(done)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 60)
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise


def row(grant: Grant) -> Trajectory:
    return Trajectory(
        row_id=grant.row_id,
        group_id=grant.group_id,
        slot=grant.slot,
        epoch=grant.epoch,
        attempt=grant.attempt,
        node_id=NodeId("n"),
        turns=(),
        reward=None,
        outcome=Outcome(kind=OutcomeKind.FAILED),
    )


async def test_a_slot_whose_lease_ends_leaves_its_group_to_the_others(tmp_path: Path) -> None:
    orders, group = NodeOrders(), OneGroup()
    api = cast(NodeClient, None)
    membership = Membership(api, orders, node_id=NodeId("n"), capacity=len(GRANTS))
    membership.ready.set()
    queue = DeliveryQueue(api, membership, AckLog(tmp_path / "acks.txt"))
    runner = slots.SlotRunner(group, membership, orders, group, queue, len(GRANTS))
    async with asyncio.TaskGroup() as tasks:
        leasing = tasks.create_task(runner.lease(tasks))
        await asyncio.wait_for(group.has_leased.wait(), 60)
        await eventually(lambda: bool(group.tellers))
        stopped, *others = GRANTS
        orders.on_stop(stopped.row_id)
        for grant in (stopped, others[0]):
            group.tellers[0](grant, row(grant))
        assert len(queue) == 1 and runner.num_held() == len(others) - 1 + len(queue)
        for grant in others[1:]:
            assert not group.is_cancelled.is_set()
            orders.on_stop(grant.row_id)
        await asyncio.wait_for(group.is_cancelled.wait(), 60)
        leasing.cancel()
    assert runner.num_held() == len(queue)
