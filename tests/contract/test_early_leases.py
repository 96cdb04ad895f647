# SPDX-License-Identifier: Apache-2.0
"""A service that starts over a long ledger leases slots before it has read what waits for a batch,
and answers everything else when it has."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.contract.dataflow_server import POLICY, serving, small_config, trajectory

from penstock.config import RunConfig
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.service.build import build, build_partly_restored
from penstock.dataflow.service.nodes.messages import (
    DeliveryAnswer,
    DeliveryRequest,
    Heartbeat,
    LeaseAnswer,
    LeaseRequest,
)
from penstock.dataflow.service.nodes.proofs import NodeSecrets
from penstock.dataflow.service.operators.messages import Status
from penstock.dataflow.service.server import build_server, surface
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.errors import StoreError
from penstock.types import GroupId, NodeId
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import ServiceClient

NODE = NodeId("n0")
LIVE = LiveVersion(policy=POLICY, incarnation=1, number=0)


def lease(request_id: str, max_slots: int) -> LeaseRequest:
    return LeaseRequest(
        request_id=request_id,
        node_id=NODE,
        boot_id="s",
        max_slots=max_slots,
        wait_s=0,
        live=(LIVE,),
    )


def delivery(grants: tuple[Grant, ...]) -> DeliveryRequest:
    rows = tuple(trajectory(grant, NODE, LIVE, reward=0.1 * grant.slot) for grant in grants)
    return DeliveryRequest(node_id=NODE, boot_id="s", deliveries=rows)


async def first_life(config: RunConfig, folder: Path) -> GroupId:
    """One group waits for its batch; returns which."""
    service = build(config, folder)
    request = IncarnationRequest(request_id="r", expected=0, number=0, seq=0)
    await service.trainers.incarnate(POLICY, request)
    version = PublishRequest(
        incarnation=1, number=0, manifest_digest=f"{1:064x}", weights_digest="w"
    )
    await service.trainers.publish(POLICY, version)
    await service.nodes.register(
        RegisterRequest(node_id=NODE, boot_id="s", capacity=64, policies=())
    )
    await service.nodes.heartbeat(NODE, Heartbeat(boot_id="s", state=NodeState.LIVE, live=(LIVE,)))
    grants = (await service.nodes.lease(lease("first", 2))).grants
    await service.nodes.deliver(delivery(grants))
    assert len(service.coordinator.consumers[POLICY].ready) == 1
    service.close()
    return grants[0].group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class NextLife:
    node: ServiceClient
    other: ServiceClient
    """Of a trainer and of whoever reads the status."""
    secret: str
    """The boot secret of the node, as its registration in the first life would have told."""


@contextlib.contextmanager
def next_life(
    config: RunConfig, folder: Path, may_read: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> Generator[NextLife]:
    """A service whose ledger is slow to give what waits for a batch."""
    signer = Signer.create(folder / "keys", config.name)
    service = build_partly_restored(config, folder / "ledger")
    restore = service.restore

    def slowly() -> list[GroupId]:
        assert may_read.wait(60)
        return restore()

    monkeypatch.setattr(service, "restore", slowly)
    facts = surface(service, config, "http://127.0.0.1:1")
    audience = [Audience.DATAFLOW]
    node_token = signer.mint(Role.ROLLOUT, audience, ttl_s=600, subject=NODE)
    with serving(build_server(facts, signer.verifier(Audience.DATAFLOW))) as url:
        node, other = (
            ServiceClient(url, token)
            for token in (node_token, signer.mint(Role.ADMIN, audience, ttl_s=600))
        )
        secrets = NodeSecrets.open(folder / "ledger", run=config.name, partition=0)
        try:
            yield NextLife(node=node, other=other, secret=secrets.of_boot(NODE, "s"))
        finally:
            may_read.set()
            node.close()
            other.close()


def lease_soon(life: NextLife) -> LeaseAnswer:
    body = replace(lease("second", 2), secret=life.secret)
    return life.node.call("POST", "/v1/leases", body, LeaseAnswer, timeout_s=60.0, deadline_s=60.0)


def test_slots_are_leased_before_the_service_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, may_read = small_config(groups_per_batch=2, steps=9), threading.Event()
    waiting = asyncio.run(first_life(config, tmp_path / "ledger"))
    with next_life(config, tmp_path, may_read, monkeypatch) as life, ThreadPoolExecutor() as pool:
        grants = lease_soon(life).grants
        assert len(grants) == 2
        beat = Heartbeat(boot_id="s", state=NodeState.LIVE, live=(LIVE,), secret=life.secret)
        life.node.call("PUT", f"/v1/nodes/{NODE}", beat, dict)
        body, request = delivery(grants), BatchRequest(consumer=POLICY, seq=1, incarnation=1)
        held = [
            pool.submit(life.node.call, "POST", "/v1/trajectories", body, DeliveryAnswer),
            pool.submit(life.other.call, "POST", "/v1/batches", request, BatchAnswer),
            pool.submit(life.other.call, "GET", "/v1/status", None, Status),
        ]
        time.sleep(0.3)
        assert not any(answer.done() for answer in held), "home has not all of it yet"
        may_read.set()
        stored, batch, _ = (answer.result(timeout=60) for answer in held)
    assert isinstance(stored, DeliveryAnswer) and isinstance(batch, BatchAnswer)
    assert {result.status for result in stored.results} == {DeliveryStatus.STORED}
    assert batch.manifest is not None
    assert {group.group_id for group in batch.manifest.groups} == {waiting, grants[0].group_id}


def test_a_run_is_not_finished_because_its_last_groups_are_not_read_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, may_read = small_config(groups_per_batch=1, steps=9), threading.Event()
    [source] = config.sources
    sources = (source.model_copy(update={"limit": 1}),)
    config = config.model_copy(update={"sources": sources})
    asyncio.run(first_life(config, tmp_path / "ledger"))
    with next_life(config, tmp_path, may_read, monkeypatch) as life:
        answer = lease_soon(life)
        assert not answer.grants and not answer.orders.finished and not answer.orders.drain


async def test_a_ledger_that_cannot_be_read_ends_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[StoreError] = []
    service = build_partly_restored(small_config(), tmp_path, on_failure=failures.append)

    def damaged() -> list[GroupId]:
        raise StoreError("a record of table fates is damaged")

    monkeypatch.setattr(service, "restore", damaged)
    with pytest.raises(StoreError):
        await service.run_timers()
    assert len(failures) == 1
    service.close()
