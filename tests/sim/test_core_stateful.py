# SPDX-License-Identifier: Apache-2.0
"""The bare core against the dictionary of `oracle.py`, with crashes and silence."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule
from tests.sim.model import (
    CAPACITY,
    MAX_STALENESS,
    NODES,
    NUM_SLOTS,
    POLICY,
    DataflowStateMachine,
    reward_of,
)
from tests.sim.world import TERMS, Settings, World

from penstock.dataflow.core.leasing import Grant, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.core.messages import IncarnationStarted, Published
from penstock.dataflow.records import BatchRecord, RowRecord, row_id
from penstock.errors import Fenced, WireError
from penstock.types import GroupId, Manifest, NodeId, Outcome, OutcomeKind, RowSummary
from penstock.wire.codec import decode


def code(error: WireError) -> str:
    return "fenced" if isinstance(error, Fenced) else "conflict"


class CoreSubject:
    def __init__(self) -> None:
        self.world = World(
            Settings(groups_per_batch=1, max_staleness=MAX_STALENESS, num_slots=NUM_SLOTS)
        )

    def join(self, node: NodeId, boot_id: str) -> None:
        world = self.world
        body = RegisterRequest(node_id=node, boot_id=boot_id, capacity=CAPACITY, policies=())
        world.partition.register(body, world.now)
        world.partition.heartbeat(node, boot_id, world.now, state=NodeState.LIVE, live=())
        world.settle()

    def lease(
        self, node: NodeId, boot_id: str, request: str, count: int, live: LiveVersion
    ) -> list[Grant]:
        world = self.world
        world.partition.ask(node, boot_id, request, world.now)
        grants = world.partition.lease(node, boot_id, request, count, (live,), world.now)
        world.settle()
        return grants

    def deliver(
        self, node: NodeId, boot_id: str, grant: Grant, live: LiveVersion, word: str
    ) -> str:
        world = self.world
        name = row_id(grant.group_id, grant.slot, grant.epoch)
        outcome = Outcome(kind=OutcomeKind.FAILED, reason="engine")
        if word != "failed":
            outcome = Outcome(kind=OutcomeKind.COMPLETED)
        row = RowRecord(
            summary=RowSummary(
                row_id=name,
                digest=word,
                outcome=outcome.kind,
                reward=reward_of(word, grant.slot) if outcome.has_reward else None,
                sampled={POLICY: 3},
                versions={POLICY: ((live.incarnation, live.number),)},
            ),
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            node_id=node,
            segment=1,
            offset=0,
            length=1,
            delivered_at=world.now,
        )
        status = world.partition.deliver(row, outcome, world.now)
        world.settle()
        known = world.tables.read(RowRecord, "row_id = :name", name=name)
        if status.value == "fenced" and known:
            return "duplicate" if known[0].summary.digest == word else "conflict"
        return status.value

    def release(self, node: NodeId, boot_id: str, grant: Grant) -> str:
        world = self.world
        held = world.partition.release(node, grant.group_id, grant.slot, grant.epoch, world.now)
        world.settle()
        return "stored" if held else "fenced"

    def incarnate(self, request: str, expected: int, number: int, seq: int) -> int | str:
        world, consumer = self.world, self.world.consumer
        try:
            record = consumer.lineage.incarnate(
                expected=expected, number=number, seq=seq, request_id=request, now=world.now
            )
        except WireError as error:
            return code(error)
        if record.incarnation != consumer.lineage.incarnation:
            world.journal(record)
            consumer.lineage.apply_incarnation(record)
            world.coordinator.broadcast(IncarnationStarted(record=record))
            rows = world.tables.rows("SELECT seq, num_groups FROM batches")
            world.coordinator.cursor_moved(consumer, {int(s): int(n) for s, n in rows}, world.now)
        world.settle()
        return record.incarnation

    def publish(self, incarnation: int, number: int) -> str:
        world, lineage = self.world, self.world.consumer.lineage
        try:
            record = lineage.publish(
                incarnation=incarnation,
                number=number,
                manifest_digest=f"m{incarnation}.{number}",
                weights_digest=f"w{incarnation}.{number}",
                now=world.now,
            )
        except WireError as error:
            return code(error)
        if not lineage.has(incarnation, number):
            world.journal(record)
            lineage.apply_version(record)
            world.coordinator.broadcast(Published(record=record))
        world.settle()
        return "ok"

    def batch(self, incarnation: int, seq: int) -> tuple[GroupId, ...] | str:
        world, consumer = self.world, self.world.consumer
        try:
            consumer.lineage.require(incarnation)
            if seq > consumer.last_sealed:
                world.sealing.seal(consumer, seq, world.now)
        except WireError as error:
            return code(error)
        world.settle()
        found = world.tables.read(BatchRecord, "seq = :seq", seq=seq)
        if not found:
            return "wait"
        return tuple(group.group_id for group in decode(found[0].manifest, Manifest).groups)

    def commit(self, incarnation: int, seq: int, number: int) -> str:
        world, consumer = self.world, self.world.consumer
        if seq > consumer.last_sealed:
            return "conflict"
        lineage = consumer.lineage
        skipped = "" if number > lineage.number else "nothing to learn"
        if lineage.last_commit is not None and lineage.last_commit.seq == seq:
            skipped = lineage.last_commit.skipped
        try:
            record = lineage.commit(
                seq=seq,
                incarnation=incarnation,
                number=number,
                skipped=skipped,
                stats="{}",
                now=world.now,
            )
        except WireError as error:
            return code(error)
        if seq > lineage.seq:
            world.journal(record)
            lineage.apply_commit(record)
            world.coordinator.committed(record)
            world.coordinator.cursor_moved(consumer, consumer.sealed, world.now)
        world.settle()
        return "ok"

    def restart(self) -> None:
        self.world.crash()

    def close(self) -> None:
        return None


class CoreMachine(DataflowStateMachine):
    subject: CoreSubject

    def make_subject(self) -> CoreSubject:
        return CoreSubject()

    @rule()
    def crash(self) -> None:
        self.subject.restart()

    @precondition(lambda self: bool(self.sessions))
    @rule(silent=st.sets(st.sampled_from(NODES)))
    def silence(self, silent: set[NodeId]) -> None:
        """A ttl passes; who did not beat loses what it held."""
        world = self.subject.world
        world.now += TERMS.ttl_s + 1
        for node in sorted(self.sessions.keys() - silent):
            world.partition.heartbeat(
                node, self.sessions[node], world.now, state=NodeState.LIVE, live=()
            )
        world.partition.tick(world.now)
        world.settle()
        for node in sorted(silent & self.sessions.keys()):
            self._lose_all(node)

    @invariant()
    def conserved(self) -> None:
        self.subject.world.assert_conserved()
        rows = self.subject.world.tables.rows("SELECT row_id, digest FROM rows")
        assert {tuple(row) for row in rows} == set(self.words.items())


TestCore = CoreMachine.TestCase
TestCore.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    # A failure shows within seconds; making it small would take minutes.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
