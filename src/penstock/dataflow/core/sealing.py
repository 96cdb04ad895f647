# SPDX-License-Identifier: Apache-2.0
"""Sealing: fixes a batch permanently, for the version it will train from. Pure.

The manifest is the only commit point: rules and staleness are checked here and never again. Serving
the batch a second time re-checks nothing. A streamed batch is sealed in instalments, and each of
them is a commit point by itself: no group leaves it, and none enters it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from blake3 import blake3
from msgspec.structs import replace

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.ids import issue_number
from penstock.dataflow.core.manifests import ManifestCache, join_manifests
from penstock.dataflow.core.rule_runner import ReplaySpec
from penstock.dataflow.records import BatchRecord, FateRecord, InstalmentRecord, Journal
from penstock.errors import Conflict
from penstock.types import DropReason, GroupId, Manifest, PolicyName, SealedGroup

RowsOf = Callable[[PolicyName, Sequence[GroupId]], Mapping[GroupId, bytes]]
"""Looks up rows that a restart left in the ledger, still encoded."""


class Sealing:
    def __init__(
        self,
        coordinator: Coordinator,
        journal: Journal,
        rows_of: RowsOf,
        manifests: ManifestCache,
    ) -> None:
        self._coordinator = coordinator
        self._journal = journal
        self._rows_of = rows_of
        self._manifests = manifests

    def seal(self, consumer: Consumer, seq: int, now: float) -> BatchRecord | None:
        """Seal batch `seq` if enough groups are ready; None: not yet."""
        coordinator, policy = self._coordinator, consumer.terms.policy
        if seq != consumer.last_sealed + 1:
            raise Conflict(f"batch {seq} requested, but the next one is {consumer.last_sealed + 1}")
        if consumer.instalments:
            found = self.seal_instalment(consumer, seq, now)
            return consumer.newest_batch if found is not None and found.is_last else None
        if consumer.terms.is_lockstep:
            return self._seal_in_order(consumer, seq, now)
        consumer.expire(now)
        self._drop_lagging(consumer, now)
        replay = coordinator.rules.replay(policy)
        consumer.update_num_replayable()
        num_to_replay = consumer.num_replayable
        wanted = consumer.terms.groups_per_batch - num_to_replay
        is_last = (
            coordinator.is_exhausted(consumer) and bool(consumer.ready) and not consumer.incomplete
        )
        if len(consumer.ready) < wanted and not is_last:
            return None
        replayed = self._choose_replayed(consumer, replay, num_to_replay, now)
        wanted = consumer.terms.groups_per_batch - len(replayed)
        if len(consumer.ready) < wanted and not is_last:
            return None  # the replay rule chose fewer than available
        rule, fresh = coordinator.rules.choose(
            policy, consumer.candidates(consumer.ready.values()), wanted, now
        )
        coordinator.rules.save_state()
        fresh, replayed = self._with_rows(policy, fresh), self._with_rows(policy, replayed)
        record = self._record(consumer, seq, fresh, replayed, now)
        self._settle(consumer, record, fresh, replayed, rule, now)
        return record

    def _seal_in_order(self, consumer: Consumer, seq: int, now: float) -> BatchRecord | None:
        """In lockstep a batch contains the groups issued for it, in that order, and waits for all
        of them.

        It is empty if none of its groups is left: later groups wait for the version after it, so
        without it they would wait forever. Its trainer skips it."""
        if not self._coordinator.has_decided_batch(consumer, seq) or consumer.incomplete:
            return None
        last = seq * consumer.terms.groups_per_batch
        ready = sorted(consumer.ready.values(), key=lambda group: issue_number(group.group_id))
        due = [group for group in ready if issue_number(group.group_id) <= last]
        fresh = self._with_rows(consumer.terms.policy, due)
        record = self._record(consumer, seq, fresh, (), now)
        self._settle(consumer, record, fresh, (), "issue", now)
        return record

    def _drop_lagging(self, consumer: Consumer, now: float) -> None:
        """Drop groups in which another policy has moved on too far."""
        policy = consumer.terms.policy
        if consumer.terms.max_partner_lag is None:
            return
        for group in self._with_rows(policy, [*consumer.ready.values()]):
            if consumer.is_lagging(group):
                consumer.drop(group, DropReason.PARTNER_LAG, "partner lag", now)
        for group in self._with_rows(policy, [*consumer.pool.values()]):
            if consumer.is_lagging(group):
                consumer.remove_from_pool(group, now)

    # --- instalments --------------------------------------------------------------------------

    def seal_instalment(self, consumer: Consumer, seq: int, now: float) -> InstalmentRecord | None:
        """Seal the groups that are ready as the next instalment of batch `seq`; None: not yet any.
        The last one also seals the batch."""
        if seq != consumer.last_sealed + 1:
            raise Conflict(f"batch {seq} requested, but the next one is {consumer.last_sealed + 1}")
        consumer.expire(now)
        self._drop_lagging(consumer, now)
        if consumer.terms.is_lockstep:
            rule, fresh, is_last = self._next_in_order(consumer, seq)
        else:
            rule, fresh, is_last = self._next_ready(consumer, now)
        if not fresh and not is_last:
            return None
        fresh = self._with_rows(consumer.terms.policy, fresh)
        record = self._instalment(consumer, seq, fresh, now, is_last=is_last)
        self._journal(record)
        consumer.add_instalment(record, fresh, rule, now)
        if is_last:
            batch = self._joined(consumer.instalments)
            self._journal(batch)
            consumer.complete_batch(batch)
            self._coordinator.broadcast_horizon(consumer)
        return record

    def _next_ready(self, consumer: Consumer, now: float) -> tuple[str, Sequence[FateRecord], bool]:
        """(rule, groups, whether they are the last): as many ready ones as the batch still takes.
        The batch is shorter if nothing is left to wait for."""
        coordinator = self._coordinator
        num_sealed = sum(one.num_groups for one in consumer.instalments)
        missing = consumer.terms.groups_per_batch - num_sealed
        ready = consumer.candidates(consumer.ready.values())
        rule, fresh = coordinator.rules.choose(consumer.terms.policy, ready, missing, now)
        coordinator.rules.save_state()
        is_over = coordinator.is_exhausted(consumer) and not consumer.incomplete
        return rule, fresh, len(fresh) == missing or is_over

    def _next_in_order(
        self, consumer: Consumer, seq: int
    ) -> tuple[str, Sequence[FateRecord], bool]:
        """In lockstep: those groups of the batch before which, in order of issue, none is
        undecided."""
        last = seq * consumer.terms.groups_per_batch
        first_undecided = self._coordinator.first_undecided(consumer)
        end = last if first_undecided is None else min(last, first_undecided - 1)
        ready = sorted(consumer.ready.values(), key=lambda group: issue_number(group.group_id))
        due = [group for group in ready if issue_number(group.group_id) <= end]
        is_last = self._coordinator.has_decided_batch(consumer, seq) and not consumer.incomplete
        return "issue", due, is_last

    def _instalment(
        self,
        consumer: Consumer,
        seq: int,
        fresh: Sequence[FateRecord],
        now: float,
        *,
        is_last: bool,
    ) -> InstalmentRecord:
        manifest = self._manifest(consumer, seq, fresh, now)
        ages = self._ages(consumer, manifest)
        assert all(not consumer.is_stale(group) for group in fresh), "expire() ran just before"
        consumer.count_partners(manifest.rows)
        consumer.count_sealed(map(manifest.reward, manifest.rows), ages)
        body = self._manifests.encode(manifest)
        return InstalmentRecord(
            consumer=consumer.terms.policy,
            seq=seq,
            instalment=len(consumer.instalments) + 1,
            incarnation=consumer.lineage.incarnation,
            trains_from=manifest.trains_from,
            num_groups=len(fresh),
            num_rows=len(ages),
            digest=blake3(body).hexdigest(),
            manifest=body,
            staleness_sum=sum(ages),
            staleness_max=max(ages, default=0),
            sealed_at=now,
            is_last=is_last,
        )

    def _joined(self, instalments: Sequence[InstalmentRecord]) -> BatchRecord:
        """The batch of these instalments; each row has the staleness that it was sealed with."""
        first, last = instalments[0], instalments[-1]
        manifest = join_manifests([self._manifests.decode(one.manifest) for one in instalments])
        num_rows = sum(one.num_rows for one in instalments)
        body = self._manifests.encode(manifest)
        return BatchRecord(
            consumer=first.consumer,
            seq=first.seq,
            incarnation=first.incarnation,
            trains_from=first.trains_from,
            num_groups=len(manifest.groups),
            num_rows=num_rows,
            digest=blake3(body).hexdigest(),
            manifest=body,
            reward_mean=sum(manifest.reward(row) for row in manifest.rows) / max(1, num_rows),
            staleness_mean=sum(one.staleness_sum for one in instalments) / max(1, num_rows),
            staleness_max=max(one.staleness_max for one in instalments),
            sealed_at=last.sealed_at,
        )

    # --- parts --------------------------------------------------------------------------------

    def _choose_replayed(
        self, consumer: Consumer, replay: ReplaySpec | None, count: int, now: float
    ) -> list[FateRecord]:
        pool = consumer.candidates(consumer.eligible(replay))
        return self._coordinator.rules.choose_replayed(consumer.terms.policy, pool, count, now)

    def _with_rows(self, policy: PolicyName, groups: Sequence[FateRecord]) -> list[FateRecord]:
        """The groups, with the rows that a restart left in the ledger."""
        missing = [group.group_id for group in groups if not group.packed_rows]
        found = self._rows_of(policy, missing)
        return [
            replace(group, packed_rows=found[group.group_id]) if group.group_id in found else group
            for group in groups
        ]

    def _settle(
        self,
        consumer: Consumer,
        record: BatchRecord,
        fresh: Sequence[FateRecord],
        replayed: Sequence[FateRecord],
        rule: str,
        now: float,
    ) -> None:
        self._journal(record)
        consumer.seal(record, fresh, replayed, rule, now)
        self._coordinator.broadcast_horizon(consumer)

    def _record(
        self,
        consumer: Consumer,
        seq: int,
        fresh: Sequence[FateRecord],
        replayed: Sequence[FateRecord],
        now: float,
    ) -> BatchRecord:
        policy, manifest = (
            consumer.terms.policy,
            self._manifest(consumer, seq, (*fresh, *replayed), now),
        )
        ages = self._ages(consumer, manifest)
        assert all(not consumer.is_stale(group) for group in fresh), "expire() ran just before"
        consumer.count_partners(manifest.rows)
        consumer.count_sealed(map(manifest.reward, manifest.rows), ages)
        body = self._manifests.encode(manifest)
        return BatchRecord(
            consumer=policy,
            seq=seq,
            incarnation=consumer.lineage.incarnation,
            trains_from=manifest.trains_from,
            num_groups=len(fresh) + len(replayed),
            num_rows=len(ages),
            digest=blake3(body).hexdigest(),
            manifest=body,
            reward_mean=sum(map(manifest.reward, manifest.rows)) / max(1, len(ages)),
            staleness_mean=sum(ages) / max(1, len(ages)),
            staleness_max=max(ages, default=0),
            sealed_at=now,
            num_replayed=len(replayed),
        )

    def _manifest(
        self, consumer: Consumer, seq: int, chosen: Sequence[FateRecord], now: float
    ) -> Manifest:
        policy = consumer.terms.policy
        groups = tuple(
            SealedGroup(group_id=g.group_id, task_key=g.task_key, rows=g.rows) for g in chosen
        )
        rows = (row for group in groups for row in group.rows)
        visible_roles = self._coordinator.rules.visible_turns(policy, rows, now)
        return Manifest(
            consumer=policy,
            seq=seq,
            trains_from=consumer.next_number,
            groups=groups,
            visible_roles=None if visible_roles is None else tuple(sorted(visible_roles)),
        )

    def _ages(self, consumer: Consumer, manifest: Manifest) -> list[int]:
        """Staleness of each row."""
        oldest = consumer.oldest_versions(manifest.rows)
        return [manifest.trains_from - number for number in oldest]
