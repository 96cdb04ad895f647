# SPDX-License-Identifier: Apache-2.0
"""The real core under virtual time: home, a partition, nodes and a trainer, no threads, no
sockets, no disk.

What a command wrote is durable when it returns; a crash rebuilds home and partition from those
records through the same code that a real restart uses.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tests.sim.disk import borrow_tables, return_tables

from penstock.dataflow.core.consumers import Consumer, PolicySpec
from penstock.dataflow.core.coordinator import IssueSpec
from penstock.dataflow.core.evaluations import Evaluations, EvaluationSpec
from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy, LeaseSpec
from penstock.dataflow.core.ids import is_evaluation
from penstock.dataflow.core.leasing import Grant, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.core.messages import IncarnationStarted, Published
from penstock.dataflow.core.rule_runner import RuleSpec
from penstock.dataflow.ledger.assemble import CoreSpec, build_coordinator_core
from penstock.dataflow.records import CommandJournal, RowRecord, row_id
from penstock.dataflow.sources import open_source
from penstock.types import NodeId, Outcome, OutcomeKind, PolicyName, RowSummary

POLICY = PolicyName("policy")
COMPLETE = ClosingPolicy(kind=ClosingKind.COMPLETE)
COMPLETED = Outcome(kind=OutcomeKind.COMPLETED)
FAILED = Outcome(kind=OutcomeKind.FAILED, reason="engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    groups_per_batch: int = 4
    max_staleness: int = 1
    steps: int = 1_000_000
    num_slots: int = 3
    closing: ClosingPolicy = COMPLETE
    admit: str = "all"
    limit: int | None = None
    """Tasks in the source."""
    is_lockstep: bool = False
    evaluation: EvaluationSpec | None = None
    evaluation_share: float = 0.0


TERMS = LeaseSpec(ttl_s=12.0, start_to_close_s=600.0, max_attempts=3)


def _rules(settings: Settings) -> Iterator[RuleSpec]:
    for policy, hook, name in (
        (None, "mix", "weights"),
        (None, "curate", "all"),
        (POLICY, "admit", settings.admit),
        (POLICY, "select", "edf"),
    ):
        yield RuleSpec(hook=hook, name=name, options={}, policy=policy, position=0)


_OF_LEVELS = """
    (SELECT count(*) FROM groups WHERE state = 'open'),
    (SELECT count(*) FROM fates WHERE state = 'admitted'),
    (SELECT coalesce(sum(num_groups), 0) FROM batches WHERE seq > :seq)
"""
LEVELS = f"SELECT {_OF_LEVELS}"
# One statement: it is asked after every event of every history.
CONSERVED = f"""
  SELECT
    (SELECT count(*) FROM groups),
    (SELECT count(*) FROM fates),
    (SELECT count(*) FROM leases l JOIN groups g ON g.group_id = l.group_id
      WHERE l.ended = '' AND g.state != 'open'),
    (SELECT count(*) FROM (SELECT group_id, slot FROM leases WHERE ended = ''
      GROUP BY group_id, slot HAVING count(*) > 1)),
    (SELECT count(*) FROM (SELECT group_id, slot FROM rows
      WHERE outcome IN ('completed', 'truncated') GROUP BY group_id, slot HAVING count(*) > 1)),
    (SELECT coalesce(max(staleness_max), 0) FROM batches),
    {_OF_LEVELS}
"""


class World:
    def __init__(self, settings: Settings | None = None, seed: int = 0) -> None:
        self.settings = settings or Settings()
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.tables = borrow_tables()
        weakref.finalize(self, return_tables, self.tables)
        self.held: dict[NodeId, list[Grant]] = {}
        self.live: dict[NodeId, LiveVersion] = {}
        self.pinned: dict[NodeId, tuple[LiveVersion, ...]] = {}
        self.issued_log: list[str] = []
        self.start()

    def start(self) -> None:
        settings = self.settings
        self.journal = CommandJournal()
        core = build_coordinator_core(
            CoreSpec(
                policies=(
                    PolicySpec(
                        policy=POLICY,
                        groups_per_batch=settings.groups_per_batch,
                        max_staleness=settings.max_staleness,
                        steps=settings.steps,
                        is_lockstep=settings.is_lockstep,
                    ),
                ),
                rules=tuple(_rules(settings)),
                issue=IssueSpec(num_slots=settings.num_slots),
                closing=settings.closing,
                lease=replace(TERMS, evaluation_share=settings.evaluation_share),
                workflow="single_turn",
                seed=0,
            ),
            [open_source("train", "penstock.tasks.reverse", limit=settings.limit)],
            self.tables,
            self.journal,
            self.now,
            evaluation=settings.evaluation,
        )
        assert core.host is not None
        self.router, self.coordinator, self.sealing = core.router, core.coordinator, core.sealing
        self.partition, self.gate = core.host.partition, core.host.gate
        self.settle()

    crash = start
    """What was not committed is gone; the rest comes back from the tables."""

    @property
    def consumer(self) -> Consumer:
        return self.coordinator.consumers[POLICY]

    @property
    def evaluations(self) -> Evaluations:
        assert self.coordinator.evaluations is not None
        return self.coordinator.evaluations

    def settle(self, command: None = None) -> int:
        """As the service does after each command; returns how many groups it issued."""
        before = len(self.partition.groups)
        self.router.run(self.now)
        ended = before - len(self.partition.groups)
        if not self.coordinator.is_finished:
            self.coordinator.issue(self.now)
        self.router.run(self.now)
        self.tables.commit(self.journal.take())
        return len(self.partition.groups) - before + ended

    # --- a trainer ---------------------------------------------------------------------------

    def incarnate(self, number: int = 0, seq: int = 0) -> int:
        lineage = self.consumer.lineage
        record = lineage.incarnate(
            expected=lineage.incarnation,
            number=number,
            seq=seq,
            request_id=f"r{lineage.incarnation + 1}",
            now=self.now,
        )
        self.journal(record)
        lineage.apply_incarnation(record)
        self.coordinator.broadcast(IncarnationStarted(record=record))
        rows = self.tables.rows("SELECT seq, num_groups FROM batches")
        self.coordinator.cursor_moved(self.consumer, {int(s): int(n) for s, n in rows}, self.now)
        self.settle()
        return record.incarnation

    def publish(self, number: int | None = None, weights: str = "") -> int:
        lineage = self.consumer.lineage
        record = lineage.publish(
            incarnation=lineage.incarnation,
            number=lineage.number if number is None else number,
            manifest_digest=f"m{lineage.incarnation}.{lineage.number}",
            weights_digest=weights or f"w{lineage.incarnation}.{lineage.number}",
            now=self.now,
        )
        self.journal(record)
        lineage.apply_version(record)
        self.coordinator.broadcast(Published(record=record))
        return self.settle()

    def seal(self) -> int | None:
        """Seal the next batch if it can be; its seq."""
        consumer = self.consumer
        if self.coordinator.has_ended(consumer):
            return None
        record = self.sealing.seal(consumer, consumer.last_sealed + 1, self.now)
        self.settle()
        return None if record is None else record.seq

    def commit(self, *, skipped: str = "") -> int:
        """Commit the batch after the cursor; returns how many groups that let start."""
        lineage = self.consumer.lineage
        record = lineage.commit(
            seq=lineage.seq + 1,
            incarnation=lineage.incarnation,
            number=lineage.number + (not skipped),
            skipped=skipped,
            stats="{}",
            now=self.now,
        )
        self.journal(record)
        lineage.apply_commit(record)
        self.coordinator.committed(record)
        self.coordinator.cursor_moved(self.consumer, self.consumer.sealed, self.now)
        return self.settle()

    # --- nodes -------------------------------------------------------------------------------

    def join(self, name: str, capacity: int = 1000, tags: tuple[str, ...] = ()) -> NodeId:
        node_id = NodeId(name)
        boot_id = f"{name}/{self.now}/{self.rng.random()}"
        body = RegisterRequest(
            node_id=node_id, boot_id=boot_id, capacity=capacity, policies=(), tags=tags
        )
        self.partition.register(body, self.now)
        self.settle()
        self.held[node_id] = []
        return node_id

    def load(self, node_id: NodeId) -> None:
        if not self.partition.target_versions:
            return
        [wanted] = self.partition.target_versions
        self.live[node_id] = LiveVersion(
            policy=POLICY, incarnation=wanted.incarnation, number=wanted.number
        )
        node = self.partition.nodes[node_id]
        self.pinned[node_id] = tuple(
            LiveVersion(policy=one.policy, incarnation=one.incarnation, number=one.number)
            for one in self.partition.pinned_versions
            if self.partition.waiting.may_evaluate(node)
        )
        self.heartbeat(node_id)

    def boot_id(self, node_id: NodeId) -> str:
        return self.partition.nodes[node_id].record.boot_id

    def heartbeat(self, node_id: NodeId) -> None:
        self.partition.heartbeat(
            node_id,
            self.boot_id(node_id),
            self.now,
            state=NodeState.LIVE,
            live=(self.live[node_id],),
            pinned=self.pinned.get(node_id, ()),
        )

    def lease(self, node_id: NodeId, num: int = 1000) -> list[Grant]:
        live = (self.live[node_id],)
        request_id = f"{node_id}/{self.rng.random()}"
        self.partition.ask(node_id, self.boot_id(node_id), request_id, self.now)
        grants = self.partition.lease(
            node_id,
            self.boot_id(node_id),
            request_id,
            num,
            live,
            self.now,
            self.pinned.get(node_id, ()),
        )
        self.settle()
        self.held[node_id] += grants
        return grants

    def deliver(
        self, node_id: NodeId, grant: Grant, outcome: Outcome = COMPLETED, reward: float = 0.5
    ) -> str:
        live = self.live[node_id]
        if is_evaluation(grant.group_id):
            [live] = self.pinned[node_id]
        row = RowRecord(
            summary=RowSummary(
                row_id=row_id(grant.group_id, grant.slot, grant.epoch),
                digest="d",
                outcome=outcome.kind,
                reward=reward if outcome.has_reward else None,
                sampled={POLICY: 3},
                versions={POLICY: ((live.incarnation, live.number),)},
            ),
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            node_id=node_id,
            segment=1,
            offset=0,
            length=1,
            delivered_at=self.now,
        )
        status = self.partition.deliver(row, outcome, self.now)
        self.settle()
        return status.value

    def work(self, node_id: NodeId) -> int:
        """Load, lease and deliver everything there is; how many rows that made."""
        self.load(node_id)
        grants = self.lease(node_id)
        for grant in grants:
            assert self.deliver(node_id, grant) == "stored"
        self.held[node_id] = []
        return len(grants)

    # --- what must hold ----------------------------------------------------------------------

    def assert_conserved(self) -> None:
        """Counted from the durable records alone, then compared with what memory believes."""
        seq = self.consumer.lineage.seq
        [row] = self.tables.rows(CONSERVED, seq=seq)
        groups, fates, running, twice, delivered, staleness, *levels = (int(n) for n in row)
        assert levels[0] == len(self.partition.groups)
        assert fates == groups - levels[0], "every ended group has one fate"
        assert running == 0, "an ended group holds no lease"
        assert twice == 0, "one lease per slot"
        assert delivered == 0, "one result per slot"
        assert staleness <= self.settings.max_staleness
        assert levels == [
            len(self.coordinator.open),
            len(self.consumer.ready),
            sum(self.consumer.sealed.values()),
        ]

    def levels(self) -> tuple[int, int, int]:
        """(issued, admitted, sealed and not committed), from the records."""
        [(issued, admitted, sealed)] = self.tables.rows(LEVELS, seq=self.consumer.lineage.seq)
        return int(issued), int(admitted), int(sealed)

    @property
    def budget(self) -> int:
        return (self.settings.max_staleness + 1) * self.settings.groups_per_batch
