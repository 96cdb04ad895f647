# SPDX-License-Identifier: Apache-2.0
"""Explains why a prompt was skipped, a trajectory dropped or a batch composed the way it was, as a
list of events in chronological order.

Selects the facts that belong to an id: a task key, group, row, batch or version. Reads the ledger
only, never a running service, and writes nothing; the sentences are in `sentences.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from penstock.dataflow.core.names import TRAIN
from penstock.dataflow.explain import sentences
from penstock.dataflow.explain.sentences import ExplainStep
from penstock.dataflow.ledger.recorded import MAX_PARTITION, RecordedRun
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import (
    BatchRecord,
    CommitRecord,
    DeadSlotRecord,
    DecisionRecord,
    FateRecord,
    FateState,
    FreedRecord,
    GroupRecord,
    IncarnationRecord,
    LeaseEnd,
    RowRecord,
    RuleStateRecord,
    VersionRecord,
)
from penstock.errors import NotFound
from penstock.types import GroupId, Manifest, PolicyName, RowId
from penstock.wire.codec import decode

MIN_PREFIX = 4
"""Minimum length of a task key prefix; the prefix must be unique."""
MAX_COUNTED = 20_000
"""Rows that are looked at to count a version's rows."""
MAX_ISSUES = 20
"""Issues of a task that are described, the newest."""
MAX_LOOK_BACK = 1000
"""Batches searched for earlier uses of a group."""
_NUMBER = "[0-9]{1,18}"
"""Of an id: what a ledger can store, and no more digits than Python converts."""
_GROUP = re.compile(rf"p{_NUMBER}-(?:e{_NUMBER}-{_NUMBER}-)?{_NUMBER}", re.ASCII)
_ROW = re.compile(rf"({_GROUP.pattern})\.({_NUMBER})\.({_NUMBER})", re.ASCII)
_VERSION = re.compile(rf"(.+)@(?:({_NUMBER})\.)?({_NUMBER})", re.ASCII)
_BATCH = re.compile(rf"(.+)\.({_NUMBER})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What happened to one id, and why."""

    id: str
    kind: str
    """`task`, `group`, `row`, `batch` or `version`."""
    summary: str
    """One sentence."""
    steps: tuple[ExplainStep, ...]
    """In chronological order."""
    related: Mapping[str, str] = field(default_factory=dict[str, str])
    """Related ids that can be explained too, by label."""


def explain(recorded: RecordedRun, id: str) -> Explanation:
    """Explain this id from the ledger. NotFound names the ids that exist."""
    if (found := _VERSION.fullmatch(id)) is not None:
        return _Explainer(recorded).version(found[1], found[2], int(found[3]), id)
    if (found := _ROW.fullmatch(id)) is not None:
        return _Explainer(recorded).row(GroupId(found[1]), int(found[2]), int(found[3]), id)
    if _GROUP.fullmatch(id) is not None:
        return _Explainer(recorded).group(GroupId(id))
    if (found := _BATCH.fullmatch(id)) is not None:
        return _Explainer(recorded).batch(PolicyName(found[1]), int(found[2]), id)
    return _Explainer(recorded).task(id)


def _missing(id: str, what: str, instead: str) -> NotFound:
    return NotFound(
        f"no such {what} in this ledger: {id[:128]!r}; {instead}. Ids look like p0-17 (group), "
        "p0-17.2.1 (row), POLICY.5 (batch) or POLICY@1.5 (version); anything else is a task key"
    )


class _Explainer:
    """Collects the facts about one id from the tables."""

    def __init__(self, recorded: RecordedRun) -> None:
        self._recorded = recorded
        self._tables: Tables = recorded.coordinator

    # --- one method per kind of id ------------------------------------------------------------

    def group(self, group_id: GroupId) -> Explanation:
        group = self._group(group_id)
        fates = self._recorded.fates(group_id)
        steps = [
            *self._issue_steps(group),
            *self._slot_steps(group, None),
            *self._end_steps(group),
            *self._decisions(group_id),
            *self._fate_steps(group, fates),
            *self._freed_steps(group),
        ]
        return Explanation(
            id=group_id,
            kind="group",
            summary=sentences.group_summary(group, fates),
            steps=_in_order(steps),
            related={"task": group.task_key} | _batches_of(fates),
        )

    def row(self, group_id: GroupId, slot: int, epoch: int, id: str) -> Explanation:
        group = self._group(group_id)
        found = self._recorded.leases(group)
        leases = [lease for lease in found if (lease.slot, lease.epoch) == (slot, epoch)]
        if not leases:
            raise _missing(
                id, "row", f"`penstock explain RUN {group_id}` lists the leases of its group"
            )
        rows = self._recorded.at(group.partition).read(RowRecord, "row_id = :id", id=id)
        is_member = leases[0].ended == LeaseEnd.DELIVERED
        fates = self._recorded.fates(group_id) if is_member else []
        steps = [
            *self._issue_steps(group),
            *self._slot_steps(group, slot),
            *self._end_steps(group),
            *self._fate_steps(group, fates, RowId(id)),
        ]
        return Explanation(
            id=id,
            kind="row",
            summary=sentences.row_summary(leases[0], rows[0] if rows else None, fates),
            steps=_in_order(steps),
            related={"group": group_id, "task": group.task_key} | _batches_of(fates),
        )

    def batch(self, policy: PolicyName, seq: int, id: str) -> Explanation:
        batch = self._recorded.batch(policy, seq)
        if batch is None:
            last = self._tables.scalar(
                "SELECT max(seq) FROM batches WHERE consumer = :policy", policy=policy
            )
            known = f"{policy} has batches 1 to {last}" if last else f"{policy} has no batches"
            raise _missing(id, "batch", known)
        manifest = decode(batch.manifest, Manifest)
        fates = {
            fate.group_id: fate
            for fate in self._tables.read(
                FateRecord,
                "consumer = :policy AND group_id IN :ids",
                policy=policy,
                ids=[str(group.group_id) for group in manifest.groups],
            )
        }
        commits = self._recorded.commits(policy, seq)
        lineage = self._recorded.lineage(policy, batch.incarnation)
        passed_over = self._passed_over(batch, fates)
        rule = self._select_rule(batch)
        sealed = sentences.sealed_batch(batch, manifest, rule, lineage, passed_over)
        steps = [
            sealed,
            *self._decisions(f"{policy} batch", batch.sealed_at),
            *self._outcome_steps(policy, commits),
        ]
        return Explanation(
            id=id,
            kind="batch",
            summary=sentences.batch_summary(batch, commits),
            steps=_in_order(steps),
            related={f"group {n}": g.group_id for n, g in enumerate(manifest.groups, 1)},
        )

    def version(self, policy: str, incarnation: str | None, number: int, id: str) -> Explanation:
        where = "policy = :policy AND number = :number"
        versions = self._tables.read(VersionRecord, where, policy=policy, number=number)
        if incarnation is not None:
            versions = [v for v in versions if v.incarnation == int(incarnation)]
        if not versions:
            last = self._tables.scalar(
                "SELECT max(number) FROM versions WHERE policy = :policy", policy=policy
            )
            known = (
                f"the newest version of {policy} is number {last}"
                if last is not None
                else "`penstock status RUN` lists the policies"
            )
            raise _missing(id, "version", known)
        version = max(versions, key=lambda one: one.incarnation)
        incarnation_record = self._tables.read(
            IncarnationRecord,
            "policy = :policy AND incarnation = :incarnation",
            policy=policy,
            incarnation=version.incarnation,
        )[0]
        commits = self._tables.read(
            CommitRecord,
            "consumer = :policy AND number = :number AND incarnation = :incarnation "
            "AND skipped = ''",
            policy=policy,
            number=number,
            incarnation=version.incarnation,
        )
        batch = self._recorded.batch(version.policy, commits[0].seq) if commits else None
        pair = f"[{version.incarnation},{version.number}]"
        counts = [
            _count_sampled(tables, pair, version.at)
            for tables in (self._tables, *self._recorded.partitions.values())
        ]
        sampled = sum(number for number, _ in counts)
        is_complete = all(is_all for _, is_all in counts)
        return Explanation(
            id=id,
            kind="version",
            summary=sentences.version_summary(
                version, commits, incarnation_record, sampled, is_complete=is_complete
            ),
            steps=_in_order(sentences.version_steps(version, commits, batch, incarnation_record)),
            related={} if batch is None else {"batch": f"{policy}.{batch.seq}"},
        )

    def task(self, id: str) -> Explanation:
        key = self._task_key(id)
        issued = self._recorded.groups("task_key = :key", key=key)
        skipped = self._tables.read(DecisionRecord, "subject = :key", key=key)
        steps: list[ExplainStep] = [sentences.decision(one) for one in skipped]
        end = ""
        newest = [*enumerate(issued, 1)][-MAX_ISSUES:]
        for _, one in newest:
            fates = self._recorded.fates(one.group_id)
            end = sentences.group_summary(one, fates)
            steps += [*self._issue_steps(one), *self._fate_steps(one, fates)]
        found = self._tables.rows("SELECT DISTINCT key FROM rules")
        keys = [one for one in (str(one) for (one,) in found) if key in one]
        rule_states = self._tables.read(RuleStateRecord, "key IN :keys", keys=keys)
        steps += [sentences.rule_state(record) for record in rule_states]
        return Explanation(
            id=key,
            kind="task",
            summary=sentences.task_summary(key, skipped, len(issued), end),
            steps=_in_order(steps),
            related={f"issue {number}": one.group_id for number, one in newest},
        )

    # --- groups of steps ----------------------------------------------------------------------

    def _issue_steps(self, group: GroupRecord) -> Iterator[ExplainStep]:
        skipped = self._tables.read(
            DecisionRecord,
            "verdict = 'skipped' AND at <= :at AND number > :after",
            at=group.issued_at,
            after=self._decisions_before(group),
        )
        yield sentences.issued(group, skipped)

    def _decisions_before(self, group: GroupRecord) -> int:
        """Number of the last decision made before the previous issue."""
        last = self._tables.scalar("SELECT max(partition) FROM groups") or 0
        partitions = range(1 + min(int(last), MAX_PARTITION))
        ids = [f"p{partition}-{group.issue - 1}" for partition in partitions]
        query = "SELECT max(issued_at) FROM groups WHERE group_id IN :ids"
        previous = self._tables.scalar(query, ids=ids)
        return int(
            self._tables.scalar(
                "SELECT coalesce(max(number), 0) FROM decisions WHERE at <= :at",
                at=-1.0 if previous is None or previous == group.issued_at else previous,
            )
        )

    def _slot_steps(self, group: GroupRecord, slot: int | None) -> Iterator[ExplainStep]:
        tables = self._recorded.at(group.partition)
        where = "group_id = :group_id" + ("" if slot is None else f" AND slot = {slot}")
        rows = {
            (row.slot, row.epoch): row
            for row in tables.read(RowRecord, where, group_id=group.group_id)
        }
        for lease in self._recorded.leases(group):
            if slot is None or lease.slot == slot:
                yield sentences.lease(lease, rows.get((lease.slot, lease.epoch)))
        for slot_record in tables.read(DeadSlotRecord, where, group_id=group.group_id):
            yield sentences.dead_slot(slot_record)

    def _end_steps(self, group: GroupRecord) -> Iterator[ExplainStep]:
        if group.state != "open":
            count = "SELECT count(*) FROM rows WHERE group_id = :id AND outcome IN :kinds"
            num_good = self._recorded.at(group.partition).scalar(
                count, id=group.group_id, kinds=["completed", "truncated"]
            )
            yield sentences.group_end(group, int(num_good))

    def _freed_steps(self, group: GroupRecord) -> Iterator[ExplainStep]:
        for freed in self._tables.read(FreedRecord, "group_id = :id", id=group.group_id):
            yield sentences.freed(freed)

    def _fate_steps(
        self, group: GroupRecord, fates: list[FateRecord], row_id: RowId | None = None
    ) -> Iterator[ExplainStep]:
        for fate in fates:
            if fate.state != FateState.SEALED:
                rows = self._recorded.at(group.partition).read(
                    RowRecord, "group_id = :id", id=group.group_id
                )
                yield sentences.fate(fate, rows)
                continue
            for batch, manifest in self._uses(fate):
                lineage = self._recorded.lineage(fate.consumer, batch.incarnation)
                yield sentences.sealed_group(fate, batch, manifest, lineage, row_id)
                yield from self._outcome_steps(
                    fate.consumer, self._recorded.commits(fate.consumer, batch.seq)
                )

    def _uses(self, fate: FateRecord) -> list[tuple[BatchRecord, Manifest]]:
        """Every batch that contains the group, oldest first."""
        found: list[tuple[BatchRecord, Manifest]] = []
        for seq in range(fate.seq, max(0, fate.seq - MAX_LOOK_BACK), -1):
            batch = self._recorded.batch(fate.consumer, seq)
            if len(found) == max(1, fate.uses) or batch is None:
                break
            manifest = decode(batch.manifest, Manifest)
            if any(group.group_id == fate.group_id for group in manifest.groups):
                found.append((batch, manifest))
        return found[::-1]

    def _outcome_steps(
        self, policy: PolicyName, commits: list[CommitRecord]
    ) -> Iterator[ExplainStep]:
        for commit in commits:
            yield sentences.commit(commit)
            if commit.skipped:
                continue
            for version in self._tables.read(
                VersionRecord,
                "policy = :policy AND incarnation = :incarnation AND number = :number",
                policy=policy,
                incarnation=commit.incarnation,
                number=commit.number,
            ):
                yield sentences.published(version)

    def _decisions(self, subject: str, at: float | None = None) -> Iterator[ExplainStep]:
        for record in self._tables.read(DecisionRecord, "subject = :subject", subject=subject):
            if at is None or record.at == at:
                yield sentences.decision(record)

    def _select_rule(self, batch: BatchRecord) -> str:
        """Name of the select rule. A replay overwrites it in the fates of a batch, so use the
        nearest batch that still has it."""
        found = self._tables.scalar(
            "SELECT rule FROM fates WHERE consumer = :policy AND state = 'sealed' "
            "AND rule != 'replay' ORDER BY abs(seq - :seq) LIMIT 1",
            policy=batch.consumer,
            seq=batch.seq,
        )
        return f"select rule {found}" if found else "the select rule"

    def _passed_over(
        self, batch: BatchRecord, fates: Mapping[GroupId, FateRecord]
    ) -> list[FateRecord]:
        """Groups that arrived before the newest group of this batch but were not selected."""
        newest = max((fate.arrival for fate in fates.values()), default=0)
        return self._tables.read(
            FateRecord,
            "consumer = :policy AND arrival < :arrival AND at > :at "
            "AND (state = 'admitted' OR (state = 'sealed' AND uses = 1 AND seq > :seq) "
            "OR (state = 'dropped' AND reason IN :late))",
            policy=batch.consumer,
            arrival=newest,
            at=batch.sealed_at,
            seq=batch.seq,
            late=["stale", "remainder"],
        )

    # --- single facts -------------------------------------------------------------------------

    def _group(self, group_id: GroupId) -> GroupRecord:
        found = self._recorded.groups("group_id = :id", id=group_id)
        if not found:
            last = self._tables.scalar("SELECT max(issue) FROM groups")
            known = f"{last} groups were issued" if last else "no group was issued yet"
            raise _missing(group_id, "group", known)
        return found[0]

    def _task_key(self, id: str) -> str:
        if self._tables.rows("SELECT 1 FROM groups WHERE task_key = :id LIMIT 1", id=id):
            return id
        is_prefix = len(id) >= MIN_PREFIX
        matches = "substr({0}, 1, length(:id)) = :id" if is_prefix else "{0} = :id"
        queries = (
            f"SELECT DISTINCT task_key FROM groups WHERE {matches.format('task_key')}",
            "SELECT DISTINCT subject FROM decisions WHERE hook = 'curate' "
            f"AND {matches.format('subject')}",
        )
        keys = {str(key) for query in queries for (key,) in self._tables.rows(query, id=id)}
        if id in keys or len(keys) == 1:
            return id if id in keys else keys.pop()
        if keys:
            raise NotFound(
                f"task key prefix {id!r} is ambiguous ({len(keys)} matches); add more characters"
            )
        raise _missing(id, "task", "no task with this key has been issued or skipped yet")


def _count_sampled(tables: Tables, pair: str, published_at: float) -> tuple[int, bool]:
    """Rows with tokens of a version, among the MAX_COUNTED that arrived after it was published;
    whether those are all that did. The first is found by halving: later arrivals came later."""
    at_arrival = "SELECT min(arrival) FROM rows WHERE space = :space AND arrival >= :at"
    moment = "SELECT delivered_at FROM rows WHERE space = :space AND arrival = :at"
    last = tables.scalar("SELECT max(arrival) FROM rows WHERE space = :space", space=TRAIN) or 0
    low, high = 0, last + 1
    while low < high:
        at = tables.scalar(at_arrival, space=TRAIN, at=(low + high) // 2)
        if at is None or tables.scalar(moment, space=TRAIN, at=at) >= published_at:
            high = (low + high) // 2
        else:
            low = at + 1
    query = (
        "SELECT count(*) FROM rows WHERE space = :space AND arrival >= :low AND arrival < :high "
        "AND versions LIKE :pair"
    )
    bounds = {"space": TRAIN, "low": low, "high": low + MAX_COUNTED, "pair": f"%{pair}%"}
    return int(tables.scalar(query, **bounds)), low + MAX_COUNTED > last


def _batches_of(fates: list[FateRecord]) -> dict[str, str]:
    return {
        f"batch of {fate.consumer}": f"{fate.consumer}.{fate.seq}" for fate in fates if fate.seq
    }


def _in_order(steps: Iterator[ExplainStep] | list[ExplainStep]) -> tuple[ExplainStep, ...]:
    """By time; steps without a time, such as rule state, come last."""
    return tuple(sorted(steps, key=lambda step: step.at or float("inf")))
