# SPDX-License-Identifier: Apache-2.0
"""Home: everything global of a run. What to issue, what to admit, what to seal, who trains. A
pure state machine.

Home holds about 100 bytes per row and never a token. It talks to partitions in Issues and
Reports, and to the world through records in its journal. The manifest of a sealed batch is the
one commit point.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from blake3 import blake3

from penstock.dataflow import pacing
from penstock.dataflow.consumers import Consumer, PolicyTerms, ReadyGroup
from penstock.dataflow.protocol import LiveVersion
from penstock.dataflow.records import (
    NEXT_FATE,
    BatchRecord,
    FateRecord,
    FateState,
    GroupRecord,
    GroupState,
    Issue,
    Journal,
    Report,
    SourceRecord,
)
from penstock.dataflow.rules import Admit, Mix
from penstock.dataflow.sources import Source
from penstock.dataflow.versions import Lineage
from penstock.errors import Conflict, NotFound
from penstock.types import (
    DropReason,
    GroupId,
    Manifest,
    PolicyName,
    PublishedVersion,
    RowSummary,
    SealedGroup,
)
from penstock.wire.codec import encode


@dataclass(frozen=True, slots=True, kw_only=True)
class IssueTerms:
    """What every group is made of."""

    workflow: str
    seed: int
    num_slots: int


def _admission(
    rules: Sequence[tuple[str, Admit]], rows: Sequence[RowSummary]
) -> tuple[str, DropReason | None]:
    """The first rule that refuses and its reason, or the last one that let the rows in."""
    verdicts = ((name, admit(rows)) for name, admit in rules)
    return next((v for v in verdicts if v[1] is not None), (rules[-1][0], None))


class Home:
    def __init__(
        self,
        policies: Sequence[PolicyTerms],
        sources: Sequence[Source],
        mix: Mix,
        issue_terms: IssueTerms,
        journal: Journal,
    ) -> None:
        self.consumers = {p.policy: Consumer(p, Lineage(p.policy)) for p in policies}
        self._sources = {source.name: source for source in sources}
        self._served = dict.fromkeys(self._sources, 0)
        self._mix = mix
        self._issue_terms = issue_terms
        self._journal = journal
        self.open: set[GroupId] = set()
        self._num_issued = 0
        self.wasted_tokens: dict[str, int] = {}

    def consumer(self, policy: str) -> Consumer:
        try:
            return self.consumers[PolicyName(policy)]
        except KeyError:
            known = ", ".join(self.consumers)
            raise NotFound(f"no policy {policy!r} in this run; it trains {known}") from None

    # --- pacing -------------------------------------------------------------------------------

    def room(self, consumer: Consumer) -> float:
        terms = consumer.terms
        levels = consumer.levels(len(self.open))
        return min(
            pacing.room(
                levels,
                groups_per_batch=terms.groups_per_batch,
                max_staleness=terms.max_staleness,
                expected_yield=consumer.expected_yield,
            ),
            pacing.room_to_end(
                levels,
                groups_per_batch=terms.groups_per_batch,
                batches_left=terms.steps - consumer.lineage.number,
                expected_yield=consumer.expected_yield,
            ),
        )

    def issue(self, partition: int, now: float) -> Iterator[Issue]:
        """Whole groups while some policy has room. Nothing starts before a first version exists."""
        while any(
            self.room(consumer) > 0 and consumer.lineage.newest is not None
            for consumer in self.consumers.values()
        ):
            record = self._next_group(partition, now)
            if record is None:
                return
            yield Issue(record=record)

    def _next_group(self, partition: int, now: float) -> GroupRecord | None:
        left = [
            (source.name, source.weight, self._served[source.name])
            for source in self._sources.values()
            if source.limit is None or self._served[source.name] < source.limit
        ]
        if not left:
            return None
        terms = self._issue_terms
        name = self._mix(left)
        ordinal = self._served[name]
        task = self._sources[name].task(ordinal, seed=terms.seed, workflow=terms.workflow)
        due = {
            policy: pacing.due_number(
                consumer.levels(len(self.open)),
                committed=consumer.lineage.number,
                groups_per_batch=consumer.terms.groups_per_batch,
            )
            for policy, consumer in self.consumers.items()
        }
        self._num_issued += 1
        self._served[name] += 1
        self._journal(SourceRecord(name=name, next_ordinal=self._served[name]))
        record = GroupRecord(
            group_id=GroupId(f"p{partition}-{self._num_issued}"),
            partition=partition,
            issue=self._num_issued,
            source=name,
            ordinal=ordinal,
            task_key=task.key,
            task=msgspec.json.encode(task).decode(),
            num_slots=terms.num_slots,
            due=msgspec.json.encode(due).decode(),
            state=GroupState.OPEN,
            reason="",
            issued_at=now,
            ended_at=0.0,
        )
        self.open.add(record.group_id)
        return record

    @property
    def is_exhausted(self) -> bool:
        """No task left and no group running."""
        return not self.open and all(
            source.limit is not None and self._served[source.name] >= source.limit
            for source in self._sources.values()
        )

    def may_run(self, due: dict[str, int], live: Sequence[LiveVersion]) -> bool:
        """Is a node with these live versions young enough for a group with this due date?"""
        held = {version.policy: version for version in live}
        for policy, consumer in self.consumers.items():
            version = held.get(policy)
            lineage = consumer.lineage
            if version is None or not lineage.has(version.incarnation, version.number):
                return False
            needed = pacing.oldest_useful(
                due[policy],
                committed=lineage.number,
                max_staleness=consumer.terms.max_staleness,
            )
            if lineage.effective(version.incarnation, version.number) < needed:
                return False
        return True

    @property
    def wanted(self) -> tuple[PublishedVersion, ...]:
        newest = (consumer.lineage.newest for consumer in self.consumers.values())
        return tuple(
            PublishedVersion(
                policy=version.policy,
                incarnation=version.incarnation,
                number=version.number,
                manifest_digest=version.manifest_digest,
            )
            for version in newest
            if version is not None
        )

    # --- admission ----------------------------------------------------------------------------

    def report(self, report: Report, now: float) -> None:
        """Judge an ended group for every consumer; one consumer's verdict delays no other."""
        self.open.discard(report.group_id)
        for consumer in self.consumers.values():
            self.expire(consumer, now)
            self._judge(consumer, report, now)

    def _judge(self, consumer: Consumer, report: Report, now: float) -> None:
        policy = consumer.terms.policy
        rows = tuple(row for row in report.rows if row.sampled.get(policy, 0) > 0)
        consumer.num_arrived += 1
        group = ReadyGroup(
            group_id=report.group_id,
            task_key=report.task_key,
            rows=rows,
            arrival=consumer.num_arrived,
            tokens=sum(row.sampled[policy] for row in rows),
        )
        if report.dropped is not None or not rows:
            reason = report.dropped or DropReason.FAILED_SLOTS
            if reason is DropReason.FAILED_SLOTS:
                consumer.expected_yield = pacing.next_yield(consumer.expected_yield, passed=False)
            self._drop(consumer, group, reason, "closing", now)
            return
        if self._is_stale(consumer, rows):
            self._drop(consumer, group, DropReason.STALE, "staleness", now)
            return
        if pacing.is_outpaced(
            consumer.levels(len(self.open)),
            groups_per_batch=consumer.terms.groups_per_batch,
            max_staleness=consumer.terms.max_staleness,
        ):
            self._drop(consumer, group, DropReason.OUTPACED, "pacing", now)
            return
        name, reason = _admission(consumer.terms.admit, rows)
        consumer.expected_yield = pacing.next_yield(consumer.expected_yield, passed=reason is None)
        if reason is not None:
            self._drop(consumer, group, reason, name, now)
            return
        consumer.ready[group.group_id] = group
        self._fate(consumer, group, FateState.ADMITTED, now, rule=name)

    def _is_stale(self, consumer: Consumer, rows: Sequence[RowSummary]) -> bool:
        return consumer.next_number - consumer.oldest(rows) > consumer.terms.max_staleness

    def expire(self, consumer: Consumer, now: float) -> None:
        """Drop what no batch can use any more: at every report, commit and fork."""
        for group in [g for g in consumer.ready.values() if self._is_stale(consumer, g.rows)]:
            del consumer.ready[group.group_id]
            self._drop(consumer, group, DropReason.STALE, "staleness", now)

    def drop_remainder(self, consumer: Consumer, now: float) -> None:
        """The policy has trained all its steps; what is left over is named and counted."""
        for group in consumer.ready.values():
            self._drop(consumer, group, DropReason.REMAINDER, "end", now)
        consumer.ready.clear()

    def _drop(
        self, consumer: Consumer, group: ReadyGroup, reason: DropReason, rule: str, now: float
    ) -> None:
        self.wasted_tokens[reason] = self.wasted_tokens.get(reason, 0) + group.tokens
        self._fate(consumer, group, FateState.DROPPED, now, rule=rule, reason=reason)

    def _fate(
        self,
        consumer: Consumer,
        group: ReadyGroup,
        state: FateState,
        now: float,
        *,
        rule: str,
        reason: str = "",
        seq: int = 0,
    ) -> None:
        self._journal(
            FateRecord(
                consumer=consumer.terms.policy,
                group_id=group.group_id,
                state=state,
                reason=reason,
                rule=rule,
                seq=seq,
                tokens=group.tokens,
                at=now,
            )
        )

    # --- sealing ------------------------------------------------------------------------------

    def seal(self, consumer: Consumer, seq: int, now: float) -> BatchRecord | None:
        """Fix batch number `seq` for ever, when enough groups are ready; None: not yet."""
        if seq != consumer.last_sealed + 1:
            raise Conflict(f"batch {seq} asked for, {consumer.last_sealed + 1} is the next")
        self.expire(consumer, now)
        wanted = consumer.terms.groups_per_batch
        if len(consumer.ready) < wanted and not (self.is_exhausted and consumer.ready):
            return None
        rule, key = consumer.terms.select
        chosen = sorted(
            consumer.ready.values(), key=lambda g: key(consumer.oldest(g.rows), g.arrival)
        )[:wanted]
        record = self._manifest(consumer, seq, chosen, now)
        self._journal(record)
        for group in chosen:
            assert FateState.SEALED in NEXT_FATE[FateState.ADMITTED]
            del consumer.ready[group.group_id]
            self._fate(consumer, group, FateState.SEALED, now, rule=rule, seq=seq)
        consumer.sealed[seq] = len(chosen)
        consumer.last_sealed = seq
        consumer.newest_batch = record
        return record

    def _manifest(
        self, consumer: Consumer, seq: int, chosen: Sequence[ReadyGroup], now: float
    ) -> BatchRecord:
        policy, trains_from = consumer.terms.policy, consumer.next_number
        manifest = Manifest(
            consumer=policy,
            seq=seq,
            trains_from=trains_from,
            groups=tuple(
                SealedGroup(group_id=g.group_id, task_key=g.task_key, rows=g.rows) for g in chosen
            ),
        )
        ages = [trains_from - consumer.number_of(row) for row in manifest.rows]
        assert max(ages) <= consumer.terms.max_staleness, "expire() ran just before"
        body = encode(manifest)
        return BatchRecord(
            consumer=policy,
            seq=seq,
            incarnation=consumer.lineage.incarnation,
            trains_from=trains_from,
            num_groups=len(chosen),
            num_rows=len(ages),
            digest=blake3(body).hexdigest(),
            manifest=body,
            reward_mean=sum(row.reward for row in manifest.rows) / len(ages),
            staleness_mean=sum(ages) / len(ages),
            staleness_max=max(ages),
            sealed_at=now,
        )

    def has_ended(self, consumer: Consumer) -> bool:
        """No further batch will be sealed for this consumer."""
        if consumer.next_number >= consumer.terms.steps:
            return True
        return self.is_exhausted and not consumer.ready

    @property
    def is_finished(self) -> bool:
        """Every policy has trained all it will ever get."""
        return all(
            consumer.is_done or (self.has_ended(consumer) and not consumer.sealed)
            for consumer in self.consumers.values()
        )

    def moved(self, consumer: Consumer, num_groups: dict[int, int], now: float) -> None:
        """The committed cursor changed, forwards by a commit or backwards by a fork."""
        consumer.sealed = {
            seq: groups for seq, groups in num_groups.items() if seq > consumer.lineage.seq
        }
        self.expire(consumer, now)
        if consumer.is_done:
            self.drop_remainder(consumer, now)

    # --- restart ------------------------------------------------------------------------------

    def restore(
        self, *, served: dict[str, int], num_issued: int, open_groups: Iterable[GroupId]
    ) -> None:
        self._served.update({name: n for name, n in served.items() if name in self._served})
        self._num_issued = num_issued
        self.open = set(open_groups)

    def restore_ready(
        self, consumer: Consumer, groups: Iterable[tuple[GroupId, str, tuple[RowSummary, ...]]]
    ) -> None:
        """Admitted and not yet sealed, in order of arrival."""
        policy = consumer.terms.policy
        for group_id, task_key, rows in groups:
            consumer.num_arrived += 1
            consumer.ready[group_id] = ReadyGroup(
                group_id=group_id,
                task_key=task_key,
                rows=rows,
                arrival=consumer.num_arrived,
                tokens=sum(row.sampled[policy] for row in rows),
            )
