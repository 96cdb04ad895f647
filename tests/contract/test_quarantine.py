# SPDX-License-Identifier: Apache-2.0
"""A node in quarantine: no more work for its credential, in every partition, after a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.dataflow_server import (
    POLICY,
    FakeTrainer,
    RunningDataflow,
    dataflow,
    free_port,
    partition,
    small_config,
    trajectory,
)

from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.records import MetaRecord, parse_quarantine, quarantine_record
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import (
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.operators.status import status
from penstock.dataflow.service.trainers.messages import (
    IncarnationRequest,
    PublishRequest,
    QuarantineRequest,
)
from penstock.errors import Fenced, Forbidden
from penstock.types import NodeId
from penstock.wire.client import ServiceClient

DRIFTS, SOUND = NodeId("drifts"), NodeId("sound")
LIVE = LiveVersion(policy=POLICY, incarnation=1, number=0)
WHY = QuarantineRequest(policy=POLICY, incarnation=1, why="k3 is 12 times the median", boot_id="s")


async def start(service: DataflowService) -> None:
    request = IncarnationRequest(request_id="r", expected=0, number=0, seq=0)
    await service.trainers.incarnate(POLICY, request)
    await service.trainers.publish(
        POLICY,
        PublishRequest(incarnation=1, number=0, manifest_digest="m", weights_digest="w"),
    )
    for node in (DRIFTS, SOUND):
        await join(service, node, "s")


async def join(service: DataflowService, node: NodeId, boot_id: str) -> None:
    await service.nodes.register(
        RegisterRequest(node_id=node, boot_id=boot_id, capacity=64, policies=())
    )
    beat = Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=(LIVE,))
    await service.nodes.heartbeat(node, beat)


async def lease(
    service: DataflowService, node: NodeId, request_id: str, boot_id: str = "s", max_slots: int = 64
) -> tuple[Grant, ...]:
    body = LeaseRequest(
        request_id=request_id,
        node_id=node,
        boot_id=boot_id,
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
    beat = Heartbeat(boot_id="s", state=NodeState.LIVE, live=(LIVE,))
    stop = (await service.nodes.heartbeat(DRIFTS, beat)).stop
    assert set(stop) == {f"{g.group_id}.{g.slot}.{g.epoch}" for g in held}
    late = DeliveryRequest(
        node_id=DRIFTS, boot_id="s", deliveries=tuple(trajectory(g, DRIFTS, LIVE) for g in held)
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


async def test_it_lasts_over_a_restart_and_over_every_new_process(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    await start(service)
    await service.trainers.quarantine(DRIFTS, WHY)
    await service.trainers.quarantine(DRIFTS, WHY)
    service.close()
    service = build(small_config(), tmp_path)
    assert await lease(service, DRIFTS, "a") == ()
    await join(service, DRIFTS, "new")
    assert await lease(service, DRIFTS, "b", "new") == ()
    second = NodeId(f"{DRIFTS}.second")
    await join(service, second, "s")
    assert await lease(service, second, "c") == (), "another node of the same credential"
    service.close()
    service = build(small_config(), tmp_path)
    assert await lease(service, second, "d") == ()
    assert len(await lease(service, SOUND, "e", max_slots=1)) == 1
    service.close()


async def test_all_nodes_of_the_credential_lose_their_leases(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    await start(service)
    second, other = NodeId(f"{DRIFTS}.second"), NodeId(f"{DRIFTS}s")
    await join(service, second, "s")
    await join(service, other, "s")
    held = await lease(service, second, "a", max_slots=1)
    await service.trainers.quarantine(DRIFTS, replace(WHY, boot_id="an older process"))
    assert service.partition.nodes[second].num_leases == 0
    assert service.partition.nodes[second].revoked == [held[0].row_id]
    assert not service.partition.nodes[other].is_quarantined, "only its name begins alike"
    service.close()


async def test_it_is_known_before_the_node_comes_and_after_it_left(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    await start(service)
    await service.nodes.leave(DRIFTS, "s")
    await service.trainers.quarantine(DRIFTS, WHY)
    await join(service, DRIFTS, "s")
    assert await lease(service, DRIFTS, "a") == ()
    service.close()


async def test_a_row_may_not_name_another_life_than_its_lease(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    await start(service)
    true, false, silent = await lease(service, SOUND, "a", max_slots=3)
    deliveries = (
        trajectory(true, SOUND, LIVE, boot_id="s"),
        trajectory(false, SOUND, LIVE, boot_id="other"),
        trajectory(silent, SOUND, LIVE),
    )
    body = DeliveryRequest(node_id=SOUND, boot_id="s", deliveries=deliveries)
    results = (await service.nodes.deliver(body)).results
    stored, invalid = DeliveryStatus.STORED, DeliveryStatus.INVALID
    assert [result.status for result in results] == [stored, invalid, stored]
    assert "boot_id other" in results[1].detail
    service.close()


async def test_only_the_one_trainer_says_it_and_a_stranger_changes_nothing(tmp_path: Path) -> None:
    service = build(small_config(), tmp_path)
    await start(service)
    second = IncarnationRequest(request_id="second", expected=1, number=0, seq=0)
    await service.trainers.incarnate(POLICY, second)
    with pytest.raises(Fenced):
        await service.trainers.quarantine(DRIFTS, WHY)
    assert not service.partition.nodes[DRIFTS].is_quarantined
    await service.trainers.quarantine(NodeId("nobody"), replace(WHY, incarnation=2))
    await service.trainers.quarantine(NodeId("nobody"), replace(WHY, incarnation=2, boot_id=""))
    assert set(service.partition.nodes) == {DRIFTS, SOUND}
    service.close()


def test_a_quarantine_record_is_parsed() -> None:
    assert parse_quarantine(quarantine_record("drifts")) == "drifts"
    old = MetaRecord(key="quarantined/drifts/boot", value="boot")
    assert parse_quarantine(old) == "drifts", "as an older penstock wrote it"


def test_every_partition_hears_of_it_and_no_node_may_say_it(tmp_path: Path) -> None:
    config, port = small_config(), free_port()
    with dataflow(tmp_path, config) as running:
        trainer = FakeTrainer(running)
        with partition(tmp_path / "p1", config, running, 1, port=port) as further:
            asyncio.run(register(running, port, DRIFTS))
            body = replace(WHY, incarnation=trainer.incarnation)
            caller = ServiceClient(running.url, running.node_token(SOUND))
            running.clients.callback(caller.close)
            with pytest.raises(Forbidden):
                caller.call("POST", f"/v1/nodes/{SOUND}/quarantine", body, Ack)
            trainer.client.quarantine(DRIFTS, body)
            wait_for(lambda: further.partition.nodes[DRIFTS].is_quarantined)


def test_a_partition_that_joins_later_or_meets_the_node_later_knows(tmp_path: Path) -> None:
    config, before, after = small_config(), free_port(), free_port()
    with dataflow(tmp_path, config) as running:
        trainer = FakeTrainer(running)
        told = replace(WHY, incarnation=trainer.incarnation)
        with partition(tmp_path / "p1", config, running, 1, port=before) as known:
            asyncio.run(register(running, before, SOUND))
            trainer.client.quarantine(DRIFTS, told)
            trainer.client.quarantine(SOUND, told)  # messages arrive in order
            wait_for(lambda: known.partition.nodes[SOUND].is_quarantined)
            asyncio.run(register(running, before, DRIFTS))
            assert known.partition.nodes[DRIFTS].is_quarantined
        with partition(tmp_path / "p2", config, running, 2, port=after) as late:
            asyncio.run(register(running, after, DRIFTS))
            wait_for(lambda: late.partition.nodes[DRIFTS].is_quarantined)


async def register(running: RunningDataflow, port: int, node: NodeId) -> None:
    client = NodeClient(f"http://127.0.0.1:{port}", running.node_token(node))
    await client.register(RegisterRequest(node_id=node, boot_id="s", capacity=4, policies=()))
    await client.close()


def wait_for(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
