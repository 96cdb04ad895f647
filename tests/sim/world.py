# SPDX-License-Identifier: Apache-2.0
"""The real core under virtual time: home, a partition, nodes and a trainer, no threads, no
sockets, no disk.

What a command wrote is durable when it returns; a crash rebuilds home and partition from those
records through the same code that a real restart uses.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec
import sqlalchemy as sa

from penstock.dataflow.consumers import Consumer, PolicyTerms
from penstock.dataflow.groups import Closing, ClosingKind, LeaseTerms, OpenGroup
from penstock.dataflow.home import Home, IssueTerms
from penstock.dataflow.partition import Partition
from penstock.dataflow.protocol import Grant, LiveVersion, NodeState, Register
from penstock.dataflow.records import Report, RowRecord, row_id
from penstock.dataflow.restore import restore_home, restore_partition
from penstock.dataflow.rules import ADMIT, MIX, SELECT
from penstock.dataflow.service import Outbox
from penstock.dataflow.sources import open_source
from penstock.dataflow.tables import Tables
from penstock.types import NodeId, Outcome, OutcomeKind, PolicyName

POLICY = PolicyName("policy")
COMPLETE = Closing(kind=ClosingKind.COMPLETE)
COMPLETED = Outcome(kind=OutcomeKind.COMPLETED)
FAILED = Outcome(kind=OutcomeKind.FAILED, reason="engine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    groups_per_batch: int = 4
    max_staleness: int = 1
    steps: int = 1_000_000
    num_slots: int = 3
    closing: Closing = COMPLETE
    admit: str = "all"
    limit: int | None = None
    """Tasks in the source."""


TERMS = LeaseTerms(ttl_s=12.0, start_to_close_s=600.0, max_attempts=3)


class World:
    def __init__(self, settings: Settings | None = None, seed: int = 0) -> None:
        self.settings = settings or Settings()
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.tables = Tables(
            sa.create_engine(
                "sqlite://",
                poolclass=sa.StaticPool,
                connect_args={"check_same_thread": False},
            )
        )
        self.held: dict[NodeId, list[Grant]] = {}
        self.live: dict[NodeId, LiveVersion] = {}
        self.issued_log: list[str] = []
        self.start()

    def start(self) -> None:
        settings = self.settings
        self.outbox = Outbox()
        terms = PolicyTerms(
            policy=POLICY,
            groups_per_batch=settings.groups_per_batch,
            max_staleness=settings.max_staleness,
            steps=settings.steps,
            admit=((settings.admit, ADMIT[settings.admit]),),
            select=("edf", SELECT["edf"]),
        )
        self.home = Home(
            [terms],
            [open_source("train", "penstock.tasks.reverse", limit=settings.limit)],
            MIX["weights"],
            IssueTerms(workflow="single_turn", seed=0, num_slots=settings.num_slots),
            self.outbox,
        )
        self.partition = Partition(0, closing=settings.closing, terms=TERMS, journal=self.outbox)
        restore_home(self.home, self.tables)
        for report in restore_partition(self.partition, self.tables, self.now):
            self.home.report(report, self.now)

    crash = start
    """What was not committed is gone; the rest comes back from the tables."""

    @property
    def consumer(self) -> Consumer:
        return self.home.consumers[POLICY]

    def settle(self, reports: list[Report] | None = None) -> int:
        """As the service does after each command; returns how many groups it issued."""
        for report in reports or []:
            self.home.report(report, self.now)
        num_issued = 0
        if not self.home.is_finished:
            for issue in self.home.issue(0, self.now):
                self.partition.issue(issue)
                num_issued += 1
        self.tables.commit(self.outbox.take())
        return num_issued

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
        self.outbox(record)
        lineage.apply_incarnation(record)
        rows = self.tables.rows("SELECT seq, num_groups FROM batches")
        self.home.moved(self.consumer, {int(s): int(n) for s, n in rows}, self.now)
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
        self.outbox(record)
        lineage.apply_version(record)
        return self.settle()

    def seal(self) -> int | None:
        """Seal the next batch if it can be; its seq."""
        consumer = self.consumer
        if self.home.has_ended(consumer):
            return None
        record = self.home.seal(consumer, consumer.last_sealed + 1, self.now)
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
        self.outbox(record)
        lineage.apply_commit(record)
        self.home.moved(self.consumer, self.consumer.sealed, self.now)
        return self.settle()

    # --- nodes -------------------------------------------------------------------------------

    def join(self, name: str, capacity: int = 1000) -> NodeId:
        node_id = NodeId(name)
        session = f"{name}/{self.now}/{self.rng.random()}"
        body = Register(node_id=node_id, session=session, capacity=capacity, policies=())
        self.settle(self.partition.register(body, self.now))
        self.held[node_id] = []
        return node_id

    def load(self, node_id: NodeId) -> None:
        newest = self.consumer.lineage.newest
        if newest is None:
            return
        self.live[node_id] = LiveVersion(
            policy=POLICY, incarnation=newest.incarnation, number=newest.number
        )
        self.heartbeat(node_id)

    def session(self, node_id: NodeId) -> str:
        return self.partition.nodes[node_id].record.session

    def heartbeat(self, node_id: NodeId) -> None:
        self.partition.heartbeat(
            node_id,
            self.session(node_id),
            self.now,
            state=NodeState.LIVE,
            live=(self.live[node_id],),
        )

    def lease(self, node_id: NodeId, num: int = 1000) -> list[Grant]:
        live = (self.live[node_id],)

        def may_run(group: OpenGroup) -> bool:
            return self.home.may_run(group.due, live)

        request_id = f"{node_id}/{self.rng.random()}"
        self.partition.ask(node_id, self.session(node_id), request_id, self.now)
        grants = self.partition.lease(
            node_id, self.session(node_id), request_id, num, may_run, self.now
        )
        self.settle()
        self.held[node_id] += grants
        return grants

    def deliver(
        self, node_id: NodeId, grant: Grant, outcome: Outcome = COMPLETED, reward: float = 0.5
    ) -> str:
        live = self.live[node_id]
        row = RowRecord(
            row_id=row_id(grant.group_id, grant.slot, grant.epoch),
            group_id=grant.group_id,
            slot=grant.slot,
            epoch=grant.epoch,
            node_id=node_id,
            digest="d",
            segment=1,
            offset=0,
            length=1,
            outcome=outcome.kind,
            reward=reward if outcome.has_reward else None,
            sampled=msgspec.json.encode({POLICY: 3}).decode(),
            versions=msgspec.json.encode({POLICY: [(live.incarnation, live.number)]}).decode(),
            delivered_at=self.now,
        )
        status, reports = self.partition.deliver(row, outcome, self.now)
        self.settle(reports)
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
        count = self.tables.scalar
        groups = count("SELECT count(*) FROM groups")
        by_state = dict(self.tables.rows("SELECT state, count(*) FROM groups GROUP BY state"))
        assert sum(by_state.values()) == groups
        assert by_state.get("open", 0) == len(self.home.open) == len(self.partition.groups)
        fates = count("SELECT count(*) FROM fates")
        assert fates == groups - by_state.get("open", 0), "every ended group has one fate"
        running = count(
            "SELECT count(*) FROM leases l JOIN groups g ON g.group_id = l.group_id "
            "WHERE l.ended = '' AND g.state != 'open'"
        )
        assert running == 0, "an ended group holds no lease"
        twice = count(
            "SELECT count(*) FROM (SELECT group_id, slot FROM leases WHERE ended = '' "
            "GROUP BY group_id, slot HAVING count(*) > 1)"
        )
        assert twice == 0, "one lease per slot"
        delivered = count(
            "SELECT count(*) FROM (SELECT group_id, slot FROM leases WHERE ended = 'delivered' "
            "GROUP BY group_id, slot HAVING count(*) > 1)"
        )
        assert delivered == 0, "one result per slot"
        assert self.levels() == (
            len(self.home.open),
            len(self.consumer.ready),
            sum(self.consumer.sealed.values()),
        )
        assert count("SELECT coalesce(max(staleness_max), 0) FROM batches") <= (
            self.settings.max_staleness
        )

    def levels(self) -> tuple[int, int, int]:
        """(issued, admitted, sealed and not committed), from the records."""
        lineage = self.consumer.lineage
        count = self.tables.scalar
        return (
            count("SELECT count(*) FROM groups WHERE state = 'open'"),
            count("SELECT count(*) FROM fates WHERE state = 'admitted'"),
            count(
                "SELECT coalesce(sum(num_groups), 0) FROM batches WHERE seq > :seq", seq=lineage.seq
            ),
        )

    @property
    def budget(self) -> int:
        return (self.settings.max_staleness + 1) * self.settings.groups_per_batch
