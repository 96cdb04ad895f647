# SPDX-License-Identifier: Apache-2.0
"""Sealing: a batch is fixed once, for ever, for the version it will train from. Pure.

The manifest is the one commit point: rules and staleness are judged here and never again. Serving
it a second time re-checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blake3 import blake3

from penstock.dataflow.core.consumers import Consumer, ReadyGroup, issue_of
from penstock.dataflow.core.home import Home
from penstock.dataflow.core.manifests import seal
from penstock.dataflow.core.rulebook import ReplayTerms
from penstock.dataflow.records import BatchRecord, FateState, Journal
from penstock.errors import Conflict
from penstock.types import GroupId, Manifest, PolicyName, SealedGroup

POOL_GROUPS = 10_000
"""Groups a replay pool holds; beyond it the oldest leave."""


RowsOf = Callable[[PolicyName, Sequence[GroupId]], Mapping[GroupId, bytes]]
"""Rows that a restart left in the ledger, still encoded."""


class Sealing:
    def __init__(self, home: Home, journal: Journal, rows_of: RowsOf) -> None:
        self._home = home
        self._journal = journal
        self._rows_of = rows_of

    def seal(self, consumer: Consumer, seq: int, now: float) -> BatchRecord | None:
        """Fix batch number `seq`, when enough groups are ready; None: not yet."""
        home, policy = self._home, consumer.terms.policy
        if seq != consumer.last_sealed + 1:
            raise Conflict(f"batch {seq} asked for, {consumer.last_sealed + 1} is the next")
        if consumer.terms.is_lockstep:
            return self._seal_in_order(consumer, seq, now)
        home.expire(consumer, now)
        replay = home.rules.replay(policy)
        home.count_replayable(consumer)
        num_again = consumer.num_replayable
        wanted = consumer.terms.groups_per_batch - num_again
        is_last = home.is_exhausted and bool(consumer.ready) and not consumer.incomplete
        if len(consumer.ready) < wanted and not is_last:
            return None
        again = self._again(consumer, replay, num_again, now)
        wanted = consumer.terms.groups_per_batch - len(again)
        if len(consumer.ready) < wanted and not is_last:
            return None  # the replay rule chose fewer than there are
        rule, chosen = home.rules.choose(
            policy, consumer.candidates(consumer.ready.values()), wanted, now
        )
        fresh = [consumer.ready[candidate.group_id] for candidate in chosen]
        home.rules.remember()
        self._bring(policy, (*fresh, *again))
        record = self._record(consumer, seq, fresh, again, now)
        self._journal(record)
        self._move(consumer, record, fresh, again, replay, rule, now)
        return record

    def _seal_in_order(self, consumer: Consumer, seq: int, now: float) -> BatchRecord | None:
        """In lockstep a batch is what was issued for it, in that order, and waits for all of it.

        It is empty when nothing of it is left: groups after it wait for the version behind it, so
        without it they would wait for ever. Its trainer skips it."""
        if not self._home.has_judged_all_of(consumer, seq) or consumer.incomplete:
            return None
        last = seq * consumer.terms.groups_per_batch
        ready = sorted(consumer.ready.values(), key=lambda group: issue_of(group.group_id))
        fresh = [group for group in ready if issue_of(group.group_id) <= last]
        self._bring(consumer.terms.policy, fresh)
        record = self._record(consumer, seq, fresh, (), now)
        self._journal(record)
        self._move(consumer, record, fresh, (), None, "issue", now)
        return record

    def _again(
        self, consumer: Consumer, replay: ReplayTerms | None, count: int, now: float
    ) -> list[ReadyGroup]:
        pool = consumer.candidates(consumer.eligible(replay))
        chosen = self._home.rules.choose_replayed(consumer.terms.policy, pool, count, now)
        return [consumer.pool[candidate.group_id] for candidate in chosen]

    def _bring(self, policy: PolicyName, groups: Sequence[ReadyGroup]) -> None:
        missing = {group.group_id: group for group in groups if not group.rows}
        if missing:
            for group_id, rows in self._rows_of(policy, list(missing)).items():
                missing[group_id].rows = rows

    def _move(
        self,
        consumer: Consumer,
        record: BatchRecord,
        fresh: Sequence[ReadyGroup],
        again: Sequence[ReadyGroup],
        replay: ReplayTerms | None,
        rule: str,
        now: float,
    ) -> None:
        home, policy = self._home, consumer.terms.policy
        home.retention.sealed(policy, record.seq, [g.group_id for g in (*fresh, *again)])
        for group in (*fresh, *again):
            group.uses += 1
            group.last_seq = record.seq
            consumer.ready.pop(group.group_id, None)
            keeps = replay is not None and group.uses < replay.max_uses
            if keeps and group.group_id not in consumer.pool:
                consumer.pool[group.group_id] = group
                home.retention.pooled(group.group_id, policy)
            home.fate(
                consumer,
                group,
                FateState.SEALED,
                now,
                rule="replay" if group.uses > 1 else rule,
                keep_rows=keeps,
            )
        consumer.sealed[record.seq] = len(fresh)
        consumer.last_sealed = record.seq
        consumer.newest_batch = record
        consumer.fruitless = consumer.fruitless.after_batch(len(fresh), consumer.expected_yield)
        self._trim_pool(consumer, replay, now)
        home.count_replayable(consumer)
        home.tell_horizon(consumer)

    def _trim_pool(self, consumer: Consumer, replay: ReplayTerms | None, now: float) -> None:
        """What can never be served again leaves the pool, and so does what is too much."""
        if replay is None:
            return
        bound = replay.max_staleness
        if bound is None:
            bound = consumer.terms.max_staleness
        leaving = [
            group
            for group in consumer.pool.values()
            if group.uses >= replay.max_uses or consumer.age(group) > bound
        ]
        staying = len(consumer.pool) - len(leaving)
        gone: set[GroupId] = {group.group_id for group in leaving}
        spare = (group for group in consumer.pool.values() if group.group_id not in gone)
        leaving += [next(spare) for _ in range(max(0, staying - POOL_GROUPS))]
        for group in leaving:
            self._home.leave_pool(consumer, group, now)

    def _record(
        self,
        consumer: Consumer,
        seq: int,
        fresh: Sequence[ReadyGroup],
        again: Sequence[ReadyGroup],
        now: float,
    ) -> BatchRecord:
        policy, trains_from = consumer.terms.policy, consumer.next_number
        groups = tuple(
            SealedGroup(group_id=g.group_id, task_key=g.task_key, rows=g.decoded())
            for g in (*fresh, *again)
        )
        rows = (row for group in groups for row in group.rows)
        sees = self._home.rules.seen(policy, rows, now)
        manifest = Manifest(
            consumer=policy,
            seq=seq,
            trains_from=trains_from,
            groups=groups,
            sees=None if sees is None else tuple(sorted(sees)),
        )
        ages = [trains_from - number for number in consumer.numbers_of(manifest.rows)]
        assert all(not consumer.is_stale(group) for group in fresh), "expire() ran just before"
        body = seal(manifest)
        return BatchRecord(
            consumer=policy,
            seq=seq,
            incarnation=consumer.lineage.incarnation,
            trains_from=trains_from,
            num_groups=len(fresh) + len(again),
            num_rows=len(ages),
            digest=blake3(body).hexdigest(),
            manifest=body,
            reward_mean=sum(row.score for row in manifest.rows) / max(1, len(ages)),
            staleness_mean=sum(ages) / max(1, len(ages)),
            staleness_max=max(ages, default=0),
            sealed_at=now,
            num_replayed=len(again),
        )
