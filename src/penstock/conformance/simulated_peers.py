# SPDX-License-Identifier: Apache-2.0
"""Simulated peers without HTTP: a node that fills batches, and a trainer that publishes versions.

Both call the service directly, so that the peer under test joins a run that makes progress.
"""

from __future__ import annotations

import random
import secrets
import tempfile
from dataclasses import replace
from pathlib import Path

from penstock.conformance.dataflow_double import POLICY
from penstock.conformance.tiny_snapshot import write_snapshot
from penstock.dataflow.core.leasing import Grant, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryRequest,
    Heartbeat,
    LeaseRequest,
)
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CommitRequest,
    IncarnationRequest,
    PublishRequest,
)
from penstock.types import (
    FinishReason,
    NodeId,
    Outcome,
    OutcomeKind,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.weights.manifest import encode_manifest, make_manifest, parse_manifest
from penstock.weights.publish import StoredVersion, put_snapshot
from penstock.weights.store import DirectoryStore
from penstock.wire.codec import encode

NODE = NodeId("stand-in")
NUM_SLOTS = 8
SPEC = SamplingSpec(max_tokens=1)


class SimulatedNode:
    """Delivers leased slots immediately, with the newest version."""

    def __init__(self, service: DataflowService) -> None:
        self._service = service
        self._boot_id = secrets.token_hex(8)
        self._has_joined = False

    async def deliver_rows(self) -> None:
        """Lease a few slots and deliver them; does nothing before a version is published."""
        newest = self._service.coordinator.consumer(POLICY).lineage.newest
        if newest is None:
            return
        live = LiveVersion(policy=POLICY, incarnation=newest.incarnation, number=newest.number)
        nodes, boot_id = self._service.nodes, self._boot_id
        if not self._has_joined:
            self._has_joined = True
            await nodes.register(
                RegisterRequest(node_id=NODE, boot_id=boot_id, capacity=NUM_SLOTS, policies=())
            )
        await nodes.heartbeat(NODE, Heartbeat(boot_id=boot_id, state=NodeState.LIVE, live=(live,)))
        lease = LeaseRequest(
            request_id=secrets.token_hex(8),
            node_id=NODE,
            boot_id=boot_id,
            max_slots=NUM_SLOTS,
            wait_s=0.0,
            live=(live,),
        )
        deliveries = tuple(_row(grant, live) for grant in (await nodes.lease(lease)).grants)
        await nodes.deliver(DeliveryRequest(node_id=NODE, boot_id=boot_id, deliveries=deliveries))


def _row(grant: Grant, live: LiveVersion) -> Delivery:
    span = VersionSpan(start=0, end=1, incarnation=live.incarnation, number=live.number)
    turn = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([4, 5, 6, 3]),
        sampled_ids=token_ids([6]),
        logprobs=log_probs([-0.5]),
        spans=(span,),
        sampling=SPEC,
        finish=FinishReason.LENGTH,
    )
    trajectory = Trajectory(
        row_id=grant.row_id,
        group_id=grant.group_id,
        slot=grant.slot,
        epoch=grant.epoch,
        attempt=grant.attempt,
        node_id=NODE,
        turns=(turn,),
        reward=float(grant.slot % 2),
        outcome=Outcome(kind=OutcomeKind.TRUNCATED, reason="length"),
    )
    return Delivery(row_id=trajectory.row_id, payload=memoryview(encode(trajectory)))


class SimulatedTrainer:
    """Commits batches as they fill, and publishes versions on request."""

    def __init__(self, service: DataflowService, store: Path, node: SimulatedNode) -> None:
        self._service = service
        self._store = store
        self._node = node
        self._rng = random.Random(secrets.token_bytes(16))

    @property
    def number(self) -> int:
        return self._service.trainers.policy_state(POLICY).number

    async def claim_incarnation(self) -> int:
        """Take over as the trainer, from the current state."""
        state = self._service.trainers.policy_state(POLICY)
        answer = await self._service.trainers.incarnate(
            POLICY,
            IncarnationRequest(
                request_id=secrets.token_hex(8),
                expected=state.incarnation,
                number=state.number,
                seq=state.seq,
            ),
        )
        return answer.incarnation

    async def train(self) -> None:
        """Train one batch, with rows of the simulated node if the peer's do not suffice."""
        while not await self._commit(skipped=""):
            await self._node.deliver_rows()

    async def skip_ready_batches(self) -> None:
        """Make room for new work without a new version."""
        while await self._commit(skipped="conformance"):
            pass

    async def _commit(self, *, skipped: str) -> bool:
        state = self._service.trainers.policy_state(POLICY)
        seq = state.seq + 1
        request = BatchRequest(consumer=POLICY, seq=seq, incarnation=state.incarnation, wait_s=0.0)
        if (await self._service.trainers.batch(request)).manifest is None:
            return False
        number = state.number if skipped else state.number + 1
        commit = CommitRequest(incarnation=state.incarnation, number=number, skipped=skipped)
        await self._service.trainers.commit(POLICY, seq, commit)
        return True

    def store_version(self, *, with_wrong_tensor: bool = False) -> StoredVersion:
        """Store new weights for the committed number, without publishing them."""
        with tempfile.TemporaryDirectory(prefix="penstock-snapshot-") as parent:
            folder = Path(parent) / "snapshot"
            write_snapshot(folder, self._rng)
            stored = put_snapshot(self._store, folder, policy=POLICY, number=self.number)
        return self._with_wrong_tensor(stored) if with_wrong_tensor else stored

    def _with_wrong_tensor(self, stored: StoredVersion) -> StoredVersion:
        """The same files with a consistent manifest that lists a different tensor."""
        store = DirectoryStore(self._store)
        good = parse_manifest(store.read_manifest(stored.manifest_digest))
        first = replace(good.tensors[0], digest=good.tensors[1].digest)
        bad = make_manifest(good.policy, good.number, good.files, (first, *good.tensors[1:]))
        digest = store.put_manifest(encode_manifest(bad))
        return StoredVersion(manifest_digest=digest, weights_digest=bad.weights_digest)

    async def publish(self, stored: StoredVersion) -> None:
        state = self._service.trainers.policy_state(POLICY)
        await self._service.trainers.publish(
            POLICY,
            PublishRequest(
                incarnation=state.incarnation,
                number=state.number,
                manifest_digest=stored.manifest_digest,
                weights_digest=stored.weights_digest,
            ),
        )
