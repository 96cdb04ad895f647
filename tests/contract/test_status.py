# SPDX-License-Identifier: Apache-2.0
"""What the status says of a run: skipped batches, repeated steps, and the reason of each wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.dataflow_server import POLICY, small_config, trajectory
from tests.contract.online_gateway import session_config
from tests.contract.test_dataflow_service import LIVE, NODE, lease, start

from penstock.config import RunConfig
from penstock.dataflow.core.leasing import Activity, NodeState
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import DeliveryRequest, Heartbeat
from penstock.dataflow.service.operators.messages import PolicyStatus
from penstock.dataflow.service.operators.status import status
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CommitRequest,
    IncarnationRequest,
    ProgressRequest,
)


def trainable(steps: int = 9) -> RunConfig:
    """One group per batch; its nodes may serve version 0 to the end."""
    config = small_config(groups_per_batch=1, steps=steps)
    training = config.training.model_copy(update={"max_staleness": steps})
    return config.model_copy(update={"training": training})


async def train(service: DataflowService, seq: int, number: int, skipped: str = "") -> None:
    """Roll out what can be leased, seal batch `seq`, and commit it."""
    grants = (await service.nodes.lease(lease(f"lease-{seq}"))).grants
    body = DeliveryRequest(
        node_id=NODE,
        boot_id="s",
        deliveries=tuple(trajectory(grant, NODE, LIVE) for grant in grants),
    )
    await service.nodes.deliver(body)
    request = BatchRequest(consumer=POLICY, seq=seq, incarnation=1, wait_s=30.0)
    assert (await service.trainers.batch(request)).manifest is not None
    commit = CommitRequest(incarnation=1, number=number, skipped=skipped)
    await service.trainers.commit(POLICY, seq, commit)


def policy_of(service: DataflowService) -> PolicyStatus:
    return status(service, "r").policies[0]


async def test_skipped_batches_are_counted_with_the_last_reason(tmp_path: Path) -> None:
    service = build(trainable(), tmp_path)
    await start(service)
    assert (policy_of(service).skipped, policy_of(service).last_skip) == (0, "")
    await train(service, 1, 1)
    await train(service, 2, 1, skipped="zero_advantage")
    await train(service, 3, 2)
    found = policy_of(service)
    assert (found.number, found.skipped, found.last_skip) == (2, 1, "zero_advantage")
    service.close()


async def test_a_trainer_that_resumes_says_which_steps_are_repeated(tmp_path: Path) -> None:
    config = trainable()
    service = build(config, tmp_path)
    await start(service)
    for step in (1, 2, 3):
        await train(service, step, step)
    assert (policy_of(service).resumed_at, policy_of(service).repeats_to) == (0, 0)
    again = IncarnationRequest(request_id="again", expected=1, number=1, seq=1)
    await service.trainers.incarnate(POLICY, again)
    found = policy_of(service)
    assert (found.number, found.resumed_at, found.repeats_to) == (1, 1, 3)
    service.close()
    restored = build(config, tmp_path)  # the service restarts too
    found = policy_of(restored)
    assert (found.number, found.resumed_at, found.repeats_to) == (1, 1, 3)
    restored.close()


async def wait_of(service: DataflowService, who: str, call: Coroutine[None, None, object]) -> str:
    """What this party waits for while its call is held open."""
    asked = asyncio.create_task(call)
    waits: list[str] = []
    for _ in range(10_000):
        waits = [wait.on for wait in status(service, "r").waiting if wait.who == who]
        if waits or asked.done():
            break
        await asyncio.sleep(0)
    assert waits, "the call was answered"
    asked.cancel()
    await asyncio.wait([asked])
    return waits[0]


async def wait_of_idle_node(service: DataflowService) -> str:
    """What a node waits for that gets no grant."""
    request = replace(lease("idle"), wait_s=30.0)
    return await wait_of(service, NODE, service.nodes.lease(request))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (session_config(), "tasks: the only source is the sessions of external agents"),
        (small_config(groups_per_batch=1, steps=9), "trainer policy to commit"),
    ],
    ids=["sessions only", "pacing"],
)
async def test_a_node_without_work_waits_for_the_right_thing(
    tmp_path: Path, config: RunConfig, expected: str
) -> None:
    service = build(config, tmp_path)
    await start(service)
    await service.tick()
    await service.nodes.lease(lease("all"))  # everything that pacing allows now
    assert await wait_of_idle_node(service) == expected
    service.close()


async def test_a_node_waits_for_tasks_when_every_source_is_exhausted(tmp_path: Path) -> None:
    config = small_config(groups_per_batch=4, steps=9)
    source = config.sources[0].model_copy(update={"limit": 1})
    service = build(config.model_copy(update={"sources": (source,)}), tmp_path)
    await start(service)
    await service.nodes.lease(lease("all"))
    assert await wait_of_idle_node(service) == "tasks: every source is exhausted"
    service.close()


async def test_one_group_is_not_groups(tmp_path: Path) -> None:
    config = small_config(groups_per_batch=4, steps=9)
    source = config.sources[0].model_copy(update={"limit": 1})
    service = build(config.model_copy(update={"sources": (source,)}), tmp_path)
    await start(service)
    await service.nodes.lease(lease("all"))
    request = BatchRequest(consumer=POLICY, seq=1, incarnation=1, wait_s=30.0)
    waits = await wait_of(service, "trainer policy", service.trainers.batch(request))
    assert waits == f"1 group on {NODE}"
    service.close()


async def test_a_restart_keeps_the_count_of_sampled_tokens(tmp_path: Path) -> None:
    """The share of waste divides all wasted tokens by it."""
    service = build(trainable(), tmp_path)
    await start(service)
    await train(service, 1, 1)
    before = status(service, "r")
    assert before.sampled_tokens > 0
    service.close()
    restored = build(trainable(), tmp_path)
    after = status(restored, "r")
    assert (after.sampled_tokens, after.wasted_tokens) == (
        before.sampled_tokens,
        before.wasted_tokens,
    )
    restored.close()


async def test_the_chain_goes_from_the_trainer_to_what_the_node_waits_for(tmp_path: Path) -> None:
    service = build(trainable(), tmp_path)
    await start(service)
    grants = (await service.nodes.lease(lease("one"))).grants
    reward = Activity(what="reward task:score", item=f"row {grants[0].row_id}", since_s=7.0)
    heartbeat = Heartbeat(
        boot_id="s", state=NodeState.LIVE, live=(LIVE,), work=(reward,), num_done=3
    )
    await service.nodes.heartbeat(NODE, heartbeat)
    found = status(service, "r")
    assert (found.nodes[0].work, found.nodes[0].num_done) == ((reward,), 3)
    assert [(link.who, link.on) for link in found.chain] == [
        (f"trainer-{POLICY}", "batch 1"),
        ("batch 1", NODE),
        (NODE, "reward task:score"),
    ]
    assert (found.chain[-1].item, found.chain[-1].service) == (reward.item, NODE)
    service.close()


async def test_a_trainer_with_a_batch_is_who_the_others_wait_for(tmp_path: Path) -> None:
    service = build(trainable(), tmp_path)
    await start(service)
    await train(service, 1, 1)
    body = DeliveryRequest(
        node_id=NODE,
        boot_id="s",
        deliveries=tuple(
            trajectory(grant, NODE, LIVE)
            for grant in (await service.nodes.lease(lease("two"))).grants
        ),
    )
    await service.nodes.deliver(body)
    request = BatchRequest(consumer=POLICY, seq=2, incarnation=1, wait_s=30.0)
    assert (await service.trainers.batch(request)).manifest is not None
    service.trainers.record_progress(POLICY, ProgressRequest(num_done=5))
    found = status(service, "r")
    assert [(link.on, link.item) for link in found.chain] == [(f"trainer-{POLICY}", "batch 2")]
    assert found.policies[0].progress == 5
    service.close()
