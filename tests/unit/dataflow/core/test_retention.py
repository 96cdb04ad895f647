# SPDX-License-Identifier: Apache-2.0
"""Retention against an oracle that keeps every fact for ever and recounts from nothing."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
)

from penstock.dataflow.core.retention import RetainedBatches, Retention
from penstock.dataflow.ledger.pinned import PAGE_BATCHES, read_retained_batches
from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import FateRecord, FateState, FreedRecord
from penstock.types import GroupId, PolicyName

A, B = PolicyName("a"), PolicyName("b")
KEEP = 2


@dataclass(slots=True)
class Facts:
    """Everything that ever happened to one consumer's groups, nothing derived."""

    undecided: set[GroupId] = field(default_factory=set[GroupId])
    batches: dict[int, list[GroupId]] = field(default_factory=dict[int, list[GroupId]])
    pool: set[GroupId] = field(default_factory=set[GroupId])
    committed: int = 0
    oldest: int | None = None
    lost: int = 0
    """Highest seq ever let go."""

    def needs(self, group_id: GroupId) -> bool:
        if group_id in self.undecided or group_id in self.pool:
            return True
        return any(group_id in batch for seq, batch in self.batches.items() if seq > self.lost)

    def let_go(self) -> None:
        floor = self.committed - KEEP if self.oldest is None else self.oldest
        self.lost = max(self.lost, min(floor, self.committed))


class RetentionMachine(RuleBasedStateMachine):
    """Two policies over one stream of groups; groups of one policy only are mixed in."""

    groups = Bundle("groups")

    def __init__(self) -> None:
        super().__init__()
        self.retention = Retention([A, B], retain_batches=KEEP)
        self.facts = {A: Facts(), B: Facts()}
        self.issued: list[GroupId] = []
        self.freed: list[GroupId] = []

    @rule(target=groups, consumers=st.sampled_from([(A,), (B,), (A, B)]))
    def issue(self, consumers: tuple[PolicyName, ...]) -> GroupId:
        group_id = GroupId(f"p0-{len(self.issued) + 1}")
        self.issued.append(group_id)
        self.retention.issued(group_id, len(consumers))
        for consumer in consumers:
            self.facts[consumer].undecided.add(group_id)
        return group_id

    @rule(group_id=groups, consumer=st.sampled_from([A, B]))
    def drop(self, group_id: GroupId, consumer: PolicyName) -> None:
        facts = self.facts[consumer]
        if group_id in facts.undecided:
            facts.undecided.remove(group_id)
            self.freed += self.retention.dropped(group_id)

    @rule(
        consumer=st.sampled_from([A, B]),
        fresh=st.integers(0, 3),
        replayed=st.integers(0, 2),
        leave=st.booleans(),
    )
    def seal(self, consumer: PolicyName, fresh: int, replayed: int, leave: bool) -> None:
        facts = self.facts[consumer]
        again = sorted(facts.pool)[:replayed]
        chosen = sorted(facts.undecided)[:fresh] + again
        if not chosen:
            return
        seq = len(facts.batches) + 1
        facts.batches[seq] = chosen
        facts.undecided -= set(chosen)
        self.retention.sealed(consumer, seq, chosen)
        for group_id in again if leave else ():
            facts.pool.remove(group_id)
            self.freed += self.retention.unpooled(group_id, consumer)

    @rule(consumer=st.sampled_from([A, B]), data=st.data())
    def pool(self, consumer: PolicyName, data: st.DataObject) -> None:
        facts = self.facts[consumer]
        pinned = {g for seq, batch in facts.batches.items() if seq > facts.lost for g in batch}
        if pinned:
            group_id = data.draw(st.sampled_from(sorted(pinned)))
            facts.pool.add(group_id)
            self.retention.pooled(group_id, consumer)

    @rule(consumer=st.sampled_from([A, B]), group_id=groups)
    def unpool(self, consumer: PolicyName, group_id: GroupId) -> None:
        self.facts[consumer].pool.discard(group_id)
        self.freed += self.retention.unpooled(group_id, consumer)

    @rule(consumer=st.sampled_from([A, B]))
    def commit(self, consumer: PolicyName) -> None:
        facts = self.facts[consumer]
        if facts.committed < len(facts.batches):
            facts.committed += 1
            facts.let_go()
            self.freed += self.retention.committed(consumer, facts.committed)

    @rule(consumer=st.sampled_from([A, B]), back=st.integers(0, 4))
    def fork(self, consumer: PolicyName, back: int) -> None:
        """Back to where the service still answers, as it promised."""
        facts = self.facts[consumer]
        seq = max(facts.committed - back, self.retention.oldest_servable(consumer))
        for group_id in (g for s, batch in facts.batches.items() if s > seq for g in batch):
            assert group_id not in self.freed, "a batch it said it can serve is gone"
        facts.committed = seq
        self.freed += self.retention.committed(consumer, seq)

    @rule(consumer=st.sampled_from([A, B]), oldest=st.one_of(st.none(), st.integers(0, 12)))
    def checkpoint(self, consumer: PolicyName, oldest: int | None) -> None:
        """Also an oldest checkpoint that was never trained: a trainer may say anything."""
        facts = self.facts[consumer]
        facts.oldest = oldest
        facts.let_go()
        self.freed += self.retention.retained(consumer, oldest)

    @rule()
    def restart(self) -> None:
        self.retention = Retention([A, B], retain_batches=KEEP)
        freed = set(self.freed)
        batches: dict[PolicyName, RetainedBatches] = {}
        for consumer, facts in self.facts.items():
            last = {g: seq for seq, batch in facts.batches.items() for g in batch}
            since = max((seq for g, seq in last.items() if g in freed), default=0)
            pinned: dict[int, tuple[GroupId, ...]] = {}
            for g, seq in sorted(last.items(), key=lambda item: item[1]):
                if seq > since:
                    pinned[seq] = (*pinned.get(seq, ()), g)
            batches[consumer] = RetainedBatches(floor=since, batches=pinned)
            facts.lost = since
            facts.let_go()
        self.freed += self.retention.restore(
            undecided=[g for facts in self.facts.values() for g in facts.undecided],
            batches=batches,
            pools={consumer: facts.pool for consumer, facts in self.facts.items()},
            cursors={c: (facts.committed, facts.oldest) for c, facts in self.facts.items()},
        )

    @invariant()
    def freed_once_and_exactly_when_nobody_needs_it(self) -> None:
        assert len(set(self.freed)) == len(self.freed), "freed twice"
        needed = {g for g in self.issued if any(f.needs(g) for f in self.facts.values())}
        assert set(self.freed) == set(self.issued) - needed

    @invariant()
    def nothing_uncommitted_is_let_go(self) -> None:
        for consumer, facts in self.facts.items():
            assert self.retention.oldest_servable(consumer) == facts.lost <= facts.committed


TestRetention = RetentionMachine.TestCase
TestRetention.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


def test_a_pinned_group_of_one_policy_costs_less_than_100_bytes() -> None:
    num_groups, per_batch = 100_000, 64
    tracemalloc.start()
    retention = Retention([A], retain_batches=num_groups)
    for seq in range(num_groups // per_batch):
        first = seq * per_batch + 1
        group_ids = [GroupId(f"p0-{first + i}") for i in range(per_batch)]
        for group_id in group_ids:
            retention.issued(group_id, 1)
        retention.sealed(A, seq + 1, group_ids)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / num_groups < 100
    assert len(retention.retained(A, None)) == 0


def fate(seq: int, group_id: str, state: FateState = FateState.SEALED) -> FateRecord:
    return FateRecord(
        consumer=A,
        group_id=GroupId(group_id),
        task_key="",
        source="",
        state=state,
        seq=seq,
    )


def test_a_start_reads_back_to_the_newest_freed_batch(tmp_path: Path) -> None:
    tables = open_tables(tmp_path)
    num = 2 * PAGE_BATCHES + 3
    sealed = [fate(seq, f"{name}{seq}") for seq in range(1, num + 1) for name in "gh"]
    tables.commit([*sealed, fate(0, "x", FateState.ADMITTED), fate(0, "y", FateState.DROPPED)])
    pinned = read_retained_batches(tables, A)
    assert (pinned.floor, list(pinned.batches)) == (0, list(range(1, num + 1)))
    names = ("y", "h1", "h2", "g5")
    tables.commit([FreedRecord(group_id=GroupId(name), at=0.0) for name in names])
    pinned = read_retained_batches(tables, A)
    assert (pinned.floor, list(pinned.batches)) == (5, list(range(6, num + 1)))
    assert sorted(pinned.batches[6]) == ["g6", "h6"]
    assert read_retained_batches(tables, B) == RetainedBatches(floor=0, batches={})
    tables.commit([FreedRecord(group_id=GroupId(f"g{num}"), at=0.0)])
    assert read_retained_batches(tables, A) == RetainedBatches(floor=num, batches={})
    tables.close()
