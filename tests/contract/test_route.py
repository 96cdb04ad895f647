# SPDX-License-Identifier: Apache-2.0
"""Two policies and their roles over real HTTP: each trainer gets the turns that its route rule
lets it see, and the same ones after a restart."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from tests.contract.dataflow_server import RunningDataflow, dataflow

from penstock.audit import audit
from penstock.config import RunConfig, dump
from penstock.config.loader import parse
from penstock.dataflow.client.dataflow import NodeClient, TrainerClient
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.ledger.sealed_batches import SealedBatches
from penstock.dataflow.records import RowRecord
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.trainer.batches import Batch, assemble
from penstock.types import (
    FinishReason,
    Manifest,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.auth import Role
from penstock.wire.codec import encode

STUDENT, TEACHER = PolicyName("student"), PolicyName("teacher")
NODE = NodeId("n0")
SOLVED, CHATTED, TAUGHT = 3, 4, 5
"""The token that each kind of turn samples."""


def two_policies(rule: str) -> RunConfig:
    """The student's own route rule; the teacher has the default."""
    text = resources.files("penstock.config").joinpath("demo.yaml").read_text(encoding="utf-8")
    model = "init: builtin:tiny-qwen3, engine: hf"
    return parse(
        text,
        origin="demo.yaml",
        overrides=[
            f"models={{student: {{{model}, dataflow: {{rules: [{rule}]}}}}, teacher: {{{model}}}}}",
            "algorithm.num_generations=2",
            "training.groups_per_batch=2",
            "training.steps=3",
        ],
    )


def turn(policy: PolicyName, token: int, role: str = "") -> Turn:
    return Turn(
        policy=policy,
        parent=-1,
        prompt_ids=token_ids([1, 2]),
        sampled_ids=token_ids([token]),
        logprobs=log_probs([-0.5 * token]),
        spans=(VersionSpan(start=0, end=1, incarnation=1, number=0),),
        sampling=SamplingSpec(),
        finish=FinishReason.STOP,
        role=role,
    )


def delivery(grant: Grant) -> Delivery:
    """Every other group is of the teacher alone."""
    taught = turn(TEACHER, TAUGHT, "explain")
    own = (turn(STUDENT, SOLVED, "solve"), turn(STUDENT, CHATTED))
    row_id = RowId(f"{grant.group_id}.{grant.slot}.{grant.epoch}")
    record = Trajectory(
        row_id=row_id,
        group_id=grant.group_id,
        slot=grant.slot,
        epoch=grant.epoch,
        attempt=grant.attempt,
        node_id=NODE,
        turns=(taught,) if int(grant.group_id.partition("-")[2]) % 2 else (*own, taught),
        reward=float(grant.slot),
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )
    return Delivery(row_id=row_id, payload=memoryview(encode(record)), secret=grant.secret)


async def roll_out(running: RunningDataflow, make: Callable[[Grant], Delivery] = delivery) -> None:
    client = NodeClient(running.url, running.node_token(NODE))
    boot_id = uuid.uuid4().hex
    live = tuple(LiveVersion(policy=p, incarnation=1, number=0) for p in (STUDENT, TEACHER))
    try:
        await client.register(
            RegisterRequest(node_id=NODE, boot_id=boot_id, capacity=64, policies=())
        )
        await client.heartbeat(NODE, Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=live))
        request = LeaseRequest(
            request_id="1", node_id=NODE, boot_id=boot_id, max_slots=64, wait_s=5.0, live=live
        )
        grants = (await client.lease(request)).grants
        body = DeliveryRequest(node_id=NODE, boot_id=boot_id, deliveries=tuple(map(make, grants)))
        results = (await client.deliver(body)).results
        assert len(results) >= 8
        assert {result.status for result in results} == {DeliveryStatus.STORED}
    finally:
        await client.close()


class OneBatch:
    """The first batch of one policy, as its trainer takes it."""

    def __init__(self, running: RunningDataflow, policy: PolicyName) -> None:
        self.client = TrainerClient(running.url, running.token(Role.TRAINER))
        running.clients.callback(self.client.close)
        self.policy = policy

    def begin(self) -> None:
        request = IncarnationRequest(request_id=uuid.uuid4().hex, expected=0, number=0, seq=0)
        self.client.incarnate(self.policy, request)
        publish = PublishRequest(
            incarnation=1, number=0, manifest_digest="0" * 64, weights_digest="1.0"
        )
        self.client.publish(self.policy, publish)

    def take(self) -> tuple[Manifest, Batch]:
        request = BatchRequest(consumer=self.policy, seq=1, incarnation=1, wait_s=10.0)
        manifest = self.client.batch(request).manifest
        assert manifest is not None
        rows = self.client.rows(self.policy, 1).rows
        return manifest, assemble(manifest, rows, self.policy, vocab_size=16)


def trained(batch: Batch) -> dict[int, float]:
    """The tokens that the batch trains, each with the log-prob of who sampled it."""
    samples = batch.samples
    ids, logprobs = samples.ids_T[samples.mask_T], samples.logprobs_T[samples.mask_T]
    return {int(token): float(p) for token, p in zip(ids, logprobs, strict=True)}


def compute_cost(batch: Batch) -> dict[int, int]:
    """Tokens of each row as it was cut."""
    samples = batch.samples
    found: Counter[int] = Counter()
    for row, start, end in zip(samples.rows_S, samples.starts_S, samples.ends_S, strict=True):
        found[int(row)] += int(end - start)
    return dict(found)


@pytest.mark.parametrize(
    ("rule", "seen"),
    [
        ("{route: by-policy}", {SOLVED, CHATTED}),
        ("{route: by-role, roles: {student: [solve]}}", {SOLVED}),
        ("{route: shared, turns_of: {student: [student, teacher]}}", {SOLVED, CHATTED, TAUGHT}),
        ("{route: shared, turns_of: {student: [teacher]}}", {TAUGHT}),
        ("{route: 'tests.unit.dataflow.rules.user_rules:BlindRoute'}", {SOLVED, CHATTED}),
    ],
)
def test_each_trainer_sees_what_its_rule_lets_it(tmp_path: Path, rule: str, seen: set[int]) -> None:
    config = two_policies(rule)
    with dataflow(tmp_path, config) as running:
        student, teacher = OneBatch(running, STUDENT), OneBatch(running, TEACHER)
        student.begin()
        teacher.begin()
        asyncio.run(roll_out(running))
        manifest, batch = student.take()
        assert trained(batch) == {token: -0.5 * token for token in seen}
        told = {index: manifest.compute_cost(row)[0] for index, row in enumerate(manifest.rows)}
        if "by-role" not in rule:  # whose other turns count, too
            assert told == compute_cost(batch)
        assert trained(teacher.take()[1]) == {TAUGHT: -0.5 * TAUGHT}
        has_taught = {row.row_id for row in manifest.rows if not row.sampled.get(STUDENT)}
        assert bool(has_taught) == (TAUGHT in seen), "groups without a turn of its own"
        own = batch.samples.versions_T[batch.samples.mask_T & (batch.samples.ids_T == TAUGHT)]
        assert not np.any(own >= 0), "what a teacher sampled is of no version of the student"
        assert running.reader().report() is not None
        assert bool(running.reader().status().detail) == ("BlindRoute" in rule)
    with dataflow(tmp_path, config) as running:
        again, same = OneBatch(running, STUDENT).take()
        assert again == manifest
        assert trained(same) == trained(batch)
    recorded = open_recorded_run(tmp_path / "ledger")
    sealed = SealedBatches(recorded, tmp_path / "ledger", STUDENT).manifest(1)
    kept = {row.row_id: row.summary.compute_cost for row in recorded.coordinator.read(RowRecord)}
    recorded.close()
    assert sealed == manifest, "replayed as served"
    assert all(row.compute_cost == kept[row.row_id] for row in manifest.rows)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert [check for check in audit(tmp_path).checks if not check.ok] == []
