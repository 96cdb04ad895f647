# SPDX-License-Identifier: Apache-2.0
"""A node in quarantine: no more work for this life of it, in every partition, after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.contract.running import (
    POLICY,
    SmallTrainer,
    dataflow,
    free_port,
    partition,
    small_config,
    trajectory,
)

from penstock.dataflow.build import build
from penstock.dataflow.client import NodeClient
from penstock.dataflow.protocol import (
    DeliveryRequest,
    DeliveryStatus,
    Done,
    Grant,
    Heartbeat,
    IncarnationRequest,
    LeaseRequest,
    LiveVersion,
    NodeState,
    PublishRequest,
    QuarantineRequest,
    Register,
)
from penstock.dataflow.service import Dataflow
from penstock.dataflow.told.status import status
from penstock.errors import Fenced, Forbidden
from penstock.types import NodeId
from penstock.wire.auth import Role
from penstock.wire.client import Caller

DRIFTS, SOUND = NodeId("drifts"), NodeId("sound")
LIVE = LiveVersion(policy=POLICY, incarnation=1, number=0)
WHY = QuarantineRequest(policy=POLICY, incarnation=1, why="k3 is 12 times the median")


async def start(service: Dataflow) -> None:
    request = IncarnationRequest(request_id="r", expected=0, number=0, seq=0)
    await service.trainers.incarnate(POLICY, request)
    await service.trainers.publish(
        POLICY,
        PublishRequest(incarnation=1, number=0, manifest_digest="m", weights_digest="w"),
    )
    for node in (DRIFTS, SOUND):
        await join(service, node, "s")


async def join(service: Dataflow, node: NodeId, session: str) -> None:
    await service.nodes.register(Register(node_id=node, session=session, capacity=64, policies=()))
    beat = Heartbeat(session=session, state=NodeState.LIVE, live=(LIVE,))
    await service.nodes.heartbeat(node, beat)


async def lease(
    service: Dataflow, node: NodeId, request_id: str, session: str = "s", max_slots: int = 64
) -> tuple[Grant, ...]:
    body = LeaseRequest(
        request_id=request_id,
        node_id=node,
        session=session,
        max_slots=max_slots,
        wait_s=0,
        live=(LIVE,),
    )
    return (await service.nodes.lease(body)).grants


async def test_what_it_holds_goes_to_others_and_it_gets_nothing_more(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    await start(service)
    held = await lease(service, DRIFTS, "a", max_slots=3)
    assert len(held) == 3
    await service.trainers.quarantine(DRIFTS, WHY)
    assert await lease(service, DRIFTS, "b") == ()
    beat = Heartbeat(session="s", state=NodeState.LIVE, live=(LIVE,))
    stop = (await service.nodes.heartbeat(DRIFTS, beat)).stop
    assert set(stop) == {f"{g.group_id}.{g.slot}.{g.epoch}" for g in held}
    late = DeliveryRequest(
        node_id=DRIFTS, session="s", deliveries=tuple(trajectory(g, DRIFTS, LIVE) for g in held)
    )
    results = (await service.nodes.deliver(late)).results
    assert {result.status for result in results} == {DeliveryStatus.FENCED}
    taken = {(g.group_id, g.slot): g for g in await lease(service, SOUND, "c")}
    for grant in held:
        again = taken[grant.group_id, grant.slot]
        assert again.epoch == grant.epoch + 1 and again.attempt == grant.attempt
    [shown] = [n for n in status(service, "r").nodes if n.node_id == DRIFTS]
    assert shown.state == "quarantined" and shown.num_leases == 0
    service.close()


async def test_it_lasts_over_a_restart_and_ends_with_a_new_life(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    await start(service)
    await service.trainers.quarantine(DRIFTS, WHY)
    await service.trainers.quarantine(DRIFTS, WHY)
    service.close()
    service = build(small_config(), tmp_path)
    assert await lease(service, DRIFTS, "a") == ()
    await join(service, DRIFTS, "s")  # the same process once more
    assert await lease(service, DRIFTS, "b") == ()
    await join(service, DRIFTS, "new")
    assert len(await lease(service, DRIFTS, "c", "new", max_slots=1)) == 1
    service.close()
    service = build(small_config(), tmp_path)
    assert len(await lease(service, DRIFTS, "d", "new", max_slots=1)) == 1
    service.close()


async def test_only_the_one_trainer_says_it_and_a_stranger_changes_nothing(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    await start(service)
    second = IncarnationRequest(request_id="second", expected=1, number=0, seq=0)
    await service.trainers.incarnate(POLICY, second)
    with pytest.raises(Fenced):
        await service.trainers.quarantine(DRIFTS, WHY)
    assert not service.partition.nodes[DRIFTS].is_quarantined
    await service.trainers.quarantine(
        NodeId("nobody"), QuarantineRequest(policy=POLICY, incarnation=2, why="")
    )
    assert set(service.partition.nodes) == {DRIFTS, SOUND}
    service.close()


def test_every_partition_hears_of_it_and_no_node_may_say_it(tmp_path: Path) -> None:
    config, port = small_config(), free_port()
    with dataflow(tmp_path, config) as running:
        trainer = SmallTrainer(running)
        with partition(tmp_path / "p1", config, running, 1, port=port) as further:

            async def register() -> None:
                client = NodeClient(f"http://127.0.0.1:{port}", running.token(Role.ROLLOUT))
                body = Register(node_id=DRIFTS, session="s", capacity=4, policies=())
                await client.register(body)
                await client.close()

            asyncio.run(register())
            body = QuarantineRequest(policy=POLICY, incarnation=trainer.incarnation, why="drift")
            caller = Caller(running.url, running.token(Role.ROLLOUT))
            running.clients.callback(caller.close)
            with pytest.raises(Forbidden):
                caller.call("POST", f"/v1/nodes/{SOUND}/quarantine", body, Done)
            node = further.partition.nodes[DRIFTS]
            give_up_at = time.monotonic() + 60
            while not node.is_quarantined and time.monotonic() < give_up_at:
                trainer.client.quarantine(DRIFTS, body)
                time.sleep(0.05)
            assert node.is_quarantined
