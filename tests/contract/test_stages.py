# SPDX-License-Identifier: Apache-2.0
"""Stages between nodes and a trainer, over real HTTP: columns flow row by row, the rows of a killed
worker are delivered again, and a dead scorer's groups end at their deadline."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.dataflow_server import (
    POLICY,
    FakeTrainer,
    RunningDataflow,
    dataflow,
    small_config,
    trajectory,
)

from penstock.config import RunConfig, StageConfig
from penstock.config.dataflow import SpaceConfig
from penstock.config.stages import stage_subject
from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.client.rows import RowsClient
from penstock.dataflow.columns.row_leases import RowTrigger
from penstock.dataflow.core.leasing import DeliveryStatus, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.ledger.blobs import BlobStore
from penstock.dataflow.service.nodes import handlers
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.trainers.messages import BatchRequest
from penstock.errors import TooLarge, Unreachable
from penstock.types import NodeId, Trajectory
from penstock.wire.auth import Role
from penstock.wire.codec import decode, encode

NODE = NodeId("n0")
LIVE = LiveVersion(policy=POLICY, incarnation=1, number=0)
REWARD = StageConfig(name="reward", reads=("turns",), writes=("reward",), ttl_s=60.0)
REFERENCE = StageConfig(
    name="reference", reads=("turns", "reward"), writes=("reference_logprobs",), on="admitted"
)


def staged(config: RunConfig, *stages: StageConfig, closing: str = "complete") -> RunConfig:
    flow = config.dataflow.model_copy(update={"stages": stages})
    return config.model_copy(update={"dataflow": flow, "reward": None})


CONFIG = staged(small_config(groups_per_batch=2, num_generations=2, steps=3), REWARD, REFERENCE)


def unscored(delivery: Delivery, extra: int = 0) -> Delivery:
    record = padded(decode(delivery.payload, Trajectory), extra)
    return replace(delivery, payload=memoryview(encode(replace(record, reward=None))))


def padded(record: Trajectory, num_bytes: int) -> Trajectory:
    """With turns that no trainer uses, each with a long grammar."""
    schema = "x" * (60 << 10)
    turn = record.turns[0]
    more = replace(turn, sampling=replace(turn.sampling, json_schema=schema))
    return replace(record, turns=(*record.turns, *[more] * -(-num_bytes // len(schema))))


async def roll_out(running: RunningDataflow, *, num_slots: int, extra: int = 0) -> int:
    """Lease and deliver up to `num_slots` slots; returns how many there were."""
    client = NodeClient(running.url, running.node_token(NODE))
    boot_id = uuid.uuid4().hex
    try:
        await client.register(
            RegisterRequest(node_id=NODE, boot_id=boot_id, capacity=64, policies=())
        )
        beat = Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=(LIVE,))
        await client.heartbeat(NODE, beat)
        request = LeaseRequest(
            request_id=uuid.uuid4().hex,
            node_id=NODE,
            boot_id=boot_id,
            max_slots=num_slots,
            wait_s=15.0,
            live=(LIVE,),
        )
        grants = (await client.lease(request)).grants
        deliveries = tuple(unscored(trajectory(g, NODE, LIVE), extra) for g in grants)
        body = DeliveryRequest(node_id=NODE, boot_id=boot_id, deliveries=deliveries)
        answer = await client.deliver(body)
        assert all(result.status is DeliveryStatus.STORED for result in answer.results)
        return len(grants)
    finally:
        await client.close()


async def score(running: RunningDataflow, stage: StageConfig, count: int) -> None:
    """One worker of this stage, for `count` rows."""
    token = running.token(Role.STAGE, subject=stage_subject(stage.name))
    async with RowsClient(running.url, token) as client:
        reader = await client.reader(
            stage.name,
            reads=stage.reads,
            writes=stage.writes,
            on=RowTrigger(stage.on),
            deadline_s=stage.deadline_s,
            ttl_s=stage.ttl_s,
            max_attempts=stage.max_attempts,
        )
        done = 0
        async for row in reader.stream():
            if stage is REFERENCE:
                done += await row.write(reference_logprobs=b"\x00" * 8)
            else:
                done += await row.write(reward=float(done % 2))
            if done >= count:
                break


def batch(trainer: FakeTrainer, seq: int, wait_s: float = 15.0) -> bool:
    request = BatchRequest(consumer=POLICY, seq=seq, incarnation=1, wait_s=wait_s)
    return trainer.client.batch(request).manifest is not None


async def with_workers(running: RunningDataflow, num_slots: int, **options: int) -> None:
    """Start the workers first: a policy with a stage without workers gets no work."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(score(running, REWARD, num_slots))
        tasks.create_task(score(running, REFERENCE, num_slots))
        await asyncio.sleep(1.2)
        rolled = await roll_out(running, num_slots=num_slots, **options)
        assert rolled == num_slots


def test_columns_of_two_stages_reach_the_trainer(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        trainer = FakeTrainer(running)
        asyncio.run(with_workers(running, 4))
        assert batch(trainer, 1)
        answer = trainer.client.batch(BatchRequest(consumer=POLICY, seq=1, incarnation=1))
        assert answer.manifest is not None
        rows = list(answer.manifest.rows)
        assert sorted(row.score for row in rows) == [0.0, 0.0, 1.0, 1.0]
        assert all(row.columns.keys() == {"reference_logprobs"} for row in rows)
        fetched = trainer.client.rows(POLICY, 1).rows
        assert all(row.columns == {"reference_logprobs": b"\x00" * 8} for row in fetched)


def test_nothing_starts_while_a_required_stage_has_no_worker(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        FakeTrainer(running)
        time.sleep(1.2)
        status = running.reader().status()
        assert status.policies[0].issued == 0 and status.policies[0].room == 0
        asyncio.run(with_workers(running, 4))


def test_large_trajectories_are_uploaded_as_blobs(tmp_path: Path) -> None:
    with dataflow(tmp_path, CONFIG) as running:
        trainer = FakeTrainer(running)
        asyncio.run(with_workers(running, 4, extra=2 << 20))
        assert batch(trainer, 1)
        fetched = trainer.client.rows(POLICY, 1).rows
        assert all(row.payload and len(row.payload) > 2 << 20 for row in fetched)
        assert len([*(tmp_path / "ledger" / "blobs").glob("??/*")]) == 4


def test_blobs_count_against_the_size_limit_of_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked before any blob is read: together they could exceed the memory."""
    monkeypatch.setattr(handlers, "MAX_CALL_BYTES", 3 << 20)
    read = BlobStore.read
    was_read: list[str] = []

    def pluralise(store: BlobStore, digest: str) -> bytes:
        was_read.append(digest)
        return read(store, digest)

    monkeypatch.setattr(BlobStore, "read", pluralise)
    config = small_config(groups_per_batch=2, num_generations=2, steps=3)
    with dataflow(tmp_path, config) as running:
        FakeTrainer(running)
        asyncio.run(bring_too_much(running, was_read))


async def bring_too_much(running: RunningDataflow, was_read: list[str]) -> None:
    client = NodeClient(running.url, running.node_token(NODE))
    try:
        await client.register(RegisterRequest(node_id=NODE, boot_id="s", capacity=64, policies=()))
        await client.heartbeat(NODE, Heartbeat(boot_id="s", state=NodeState.LIVE, live=(LIVE,)))
        request = LeaseRequest(
            request_id="1", node_id=NODE, boot_id="s", max_slots=2, wait_s=15.0, live=(LIVE,)
        )
        rows = [large(trajectory(g, NODE, LIVE)) for g in (await client.lease(request)).grants]
        assert len(rows) == 2
        body = DeliveryRequest(node_id=NODE, boot_id="s", deliveries=tuple(rows))
        with pytest.raises(TooLarge, match="blobs included"):
            await client.deliver(body)
        assert not was_read
        for row in rows:  # each one fits, and its lease is still valid
            [result] = (await client.deliver(replace(body, deliveries=(row,)))).results
            assert result.status is DeliveryStatus.STORED
        assert len(was_read) == 2
    finally:
        await client.close()


def large(delivery: Delivery) -> Delivery:
    """2 MB, so it is uploaded as a blob."""
    record = padded(decode(delivery.payload, Trajectory), 2 << 20)
    return replace(delivery, payload=memoryview(encode(record)))


def test_rows_of_a_killed_worker_are_delivered_again(tmp_path: Path) -> None:
    # A machine that stands still costs attempts too, each time.
    brief = REWARD.model_copy(update={"ttl_s": 1.0, "max_attempts": 100})
    config = staged(small_config(groups_per_batch=2, num_generations=2, steps=3), brief, REFERENCE)

    async def die_holding_rows(running: RunningDataflow) -> None:
        token = running.token(Role.STAGE, subject=stage_subject(brief.name))
        async with RowsClient(running.url, token) as client:
            reader = await client.reader(
                brief.name,
                reads=brief.reads,
                writes=brief.writes,
                deadline_s=brief.deadline_s,
                ttl_s=brief.ttl_s,
                max_attempts=brief.max_attempts,
            )
            async for _ in reader.stream():
                return

    async def scenario(running: RunningDataflow) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(score(running, REFERENCE, 4))
            dying = tasks.create_task(die_holding_rows(running))
            await asyncio.sleep(1.2)
            await roll_out(running, num_slots=4)
            await dying
            await score(running, brief, 4)

    with dataflow(tmp_path, config) as running:
        trainer = FakeTrainer(running)
        asyncio.run(scenario(running))
        assert batch(trainer, 1)


def test_groups_of_a_dead_scorer_end_at_their_deadline(tmp_path: Path) -> None:
    dead = REFERENCE.model_copy(update={"deadline_s": 1.0})
    config = staged(small_config(groups_per_batch=2, num_generations=2, steps=3), REWARD, dead)

    async def scenario(running: RunningDataflow) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(score(running, REWARD, 4))
            idle = tasks.create_task(score(running, dead, 10**9))
            await asyncio.sleep(1.2)
            idle.cancel()  # it was running, so work started; it never comes back
            await roll_out(running, num_slots=4)

    with dataflow(tmp_path, config) as running:
        trainer = FakeTrainer(running)
        asyncio.run(scenario(running))
        give_up_at = time.monotonic() + 60
        wasted: dict[str, int] = {}
        while wasted.get("column_failed", 0) < 8:
            assert time.monotonic() < give_up_at, f"groups are still open; wasted so far {wasted}"
            wasted = running.reader().status().wasted_tokens
            time.sleep(0.1)
        assert not batch(trainer, 1, wait_s=0.0)
        assert wasted["column_failed"] == 8


async def test_a_quota_in_the_config_holds(tmp_path: Path) -> None:
    spaces = (SpaceConfig(name="eval", quota_mb=1),)
    flow = CONFIG.dataflow.model_copy(update={"spaces": spaces})
    with dataflow(tmp_path, CONFIG.model_copy(update={"dataflow": flow})) as running:
        token = running.token(Role.ADMIN)
        async with RowsClient(running.url, token, patience_s=1.5) as client:
            await client.put("eval", {"a": {"x": bytes(600_000)}})
            with pytest.raises(Unreachable, match="507"):
                await client.put("eval", {"b": {"x": bytes(600_000)}})
            await client.put("other", {"b": {"x": bytes(600_000)}})
