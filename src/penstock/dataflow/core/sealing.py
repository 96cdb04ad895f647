# SPDX-License-Identifier: Apache-2.0
"""Sealing: a batch is fixed once, for ever, for the version it will train from. Pure.

The manifest is the one commit point: rules and staleness are judged here and never again. Serving
it a second time re-checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blake3 import blake3

from penstock.dataflow.core.consumers import Consumer, ReadyGroup, issue_number
from penstock.dataflow.core.home import Coordinator
from penstock.dataflow.core.manifests import seal
from penstock.dataflow.core.rulebook import ReplaySpec
from penstock.dataflow.records import BatchRecord, FateState, Journal
from penstock.errors import Conflict
from penstock.types import GroupId, Manifest, PolicyName, SealedGroup

POOL_GROUPS = 10_000
"""Groups a replay pool holds; beyond it the oldest leave."""


RowsOf = Callable[[PolicyName, Sequence[GroupId]], Mapping[GroupId, bytes]]
"""Rows that a restart left in the ledger, still encoded."""


class Sealing:
    def __init__(self, coordinator: Coordinator, journal: Journal, rows_of: RowsOf) -> None:
        self._coordinator = coordinator
        self._journal = journal
        self._rows_of = rows_of

    def seal(self, consumer: Consumer, seq: int, now: float) -> BatchRecord | None:
        """Fix batch number `seq`, when enough groups are ready; None: not yet."""
        coordinator, policy = self._coordinator, consumer.terms.policy
        if seq != consumer.last_sealed + 1:
            raise Conflict(f"batch {seq} asked for, {consumer.last_sealed + 1} is the next")
        if consumer.terms.is_lockstep:
            return self._seal_in_order(consumer, seq, now)
        coordinator.expire(consumer, now)
        replay = coordinator.rules.replay(policy)
        coordinator.update_num_replayable(consumer)
        num_to_replay = consumer.num_replayable
        wanted = consumer.terms.groups_per_batch - num_to_replay
        is_last = coordinator.is_exhausted and bool(consumer.ready) and not consumer.incomplete
        if len(consumer.ready) < wanted and not is_last:
            return None
        again = self._choose_replayed(consumer, replay, num_to_replay, now)
        wanted = consumer.terms.groups_per_batch - len(again)
        if len(consumer.ready) < wanted and not is_last:
            return None  # the replay rule chose fewer than there are
        rule, chosen = coordinator.rules.choose(
            policy, consumer.candidates(consumer.ready.values()), wanted, now
        )
        fresh = [consumer.ready[candidate.group_id] for candidate in chosen]
        coordinator.rules.save_state()
        self._load_rows(policy, (*fresh, *again))
        record = self._record(consumer, seq, fresh, again, now)
        self._journal(record)
        self._move(consumer, record, fresh, again, replay, rule, now)
        return record

    def _seal_in_order(self, consumer: Consumer, seq: int, now: float) -> BatchRecord | None:
        """In lockstep a batch is what was issued for it, in that order, and waits for all of it.

        It is empty when nothing of it is left: groups after it wait for the version behind it, so
        without it they would wait for ever. Its trainer skips it."""
        if not self._coordinator.has_decided_batch(consumer, seq) or consumer.incomplete:
            return None
        last = seq * consumer.terms.groups_per_batch
        ready = sorted(consumer.ready.values(), key=lambda group: issue_number(group.group_id))
        fresh = [group for group in ready if issue_number(group.group_id) <= last]
        self._load_rows(consumer.terms.policy, fresh)
        record = self._record(consumer, seq, fresh, (), now)
        self._journal(record)
        self._move(consumer, record, fresh, (), None, "issue", now)
        return record

    def _choose_replayed(
        self, consumer: Consumer, replay: ReplaySpec | None, count: int, now: float
    ) -> list[ReadyGroup]:
        pool = consumer.candidates(consumer.eligible(replay))
        chosen = self._coordinator.rules.choose_replayed(consumer.terms.policy, pool, count, now)
        return [consumer.pool[candidate.group_id] for candidate in chosen]

    def _load_rows(self, policy: PolicyName, groups: Sequence[ReadyGroup]) -> None:
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
        replay: ReplaySpec | None,
        rule: str,
        now: float,
    ) -> None:
        coordinator, policy = self._coordinator, consumer.terms.policy
        coordinator.retention.sealed(policy, record.seq, [g.group_id for g in (*fresh, *again)])
        for group in (*fresh, *again):
            group.uses += 1
            group.last_seq = record.seq
            consumer.ready.pop(group.group_id, None)
            keeps = replay is not None and group.uses < replay.max_uses
            if keeps and group.group_id not in consumer.pool:
                consumer.pool[group.group_id] = group
                coordinator.retention.pooled(group.group_id, policy)
            coordinator.fate(
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
        consumer.starvation = consumer.starvation.reset_after_batch(
            len(fresh), consumer.expected_yield
        )
        self._trim_pool(consumer, replay, now)
        coordinator.update_num_replayable(consumer)
        coordinator.broadcast_horizon(consumer)

    def _trim_pool(self, consumer: Consumer, replay: ReplaySpec | None, now: float) -> None:
        """What can never be served again leaves the pool, and so does what is too much."""
        if replay is None:
            return
        bound = replay.max_staleness
        if bound is None:
            bound = consumer.terms.max_staleness
        leaving = [
            group
            for group in consumer.pool.values()
            if group.uses >= replay.max_uses or consumer.staleness(group) > bound
        ]
        staying = len(consumer.pool) - len(leaving)
        gone: set[GroupId] = {group.group_id for group in leaving}
        spare = (group for group in consumer.pool.values() if group.group_id not in gone)
        leaving += [next(spare) for _ in range(max(0, staying - POOL_GROUPS))]
        for group in leaving:
            self._coordinator.remove_from_pool(consumer, group, now)

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
        visible_roles = self._coordinator.rules.seen(policy, rows, now)
        manifest = Manifest(
            consumer=policy,
            seq=seq,
            trains_from=trains_from,
            groups=groups,
            visible_roles=None if visible_roles is None else tuple(sorted(visible_roles)),
        )
        ages = [trains_from - number for number in consumer.oldest_versions(manifest.rows)]
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
