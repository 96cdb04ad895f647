# SPDX-License-Identifier: Apache-2.0
"""Restores the in-memory state of the coordinator and a partition from the ledger.

Only open and unsealed groups are loaded; anything older is read by SQL on request.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, TypeVar

import msgspec

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.core.completion import ColumnCompleted, Stage
from penstock.dataflow.core.consumers import Consumer, yield_key
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.evaluations import Evaluations
from penstock.dataflow.core.failure_limit import FAILURES_KEY
from penstock.dataflow.core.links import Link
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.core.partition_runtime import PartitionRuntime
from penstock.dataflow.core.spot_checks import CHECKS_PREFIX
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.ledger.pinned import read_retained_batches
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import (
    FORGOTTEN_PREFIX,
    QUARANTINE_PREFIX,
    BatchRecord,
    CommitRecord,
    CompletionRecord,
    DeadSlotRecord,
    EvaluatedRecord,
    EvaluationRecord,
    FateRecord,
    FateState,
    GrantRecord,
    GroupRecord,
    IncarnationRecord,
    InstalmentRecord,
    LeaseRecord,
    LinkRecord,
    MessageRecord,
    MetaRecord,
    NodeRecord,
    RowRecord,
    RuleStateRecord,
    SourceRecord,
    VersionRecord,
    WasteRecord,
    parse_quarantine,
)
from penstock.types import GroupId, Outcome, PolicyName, RowId

R = TypeVar("R")
OPEN_GROUPS = "SELECT group_id FROM groups WHERE partition = :partition AND state = 'open'"
IN_OPEN_GROUPS = f"group_id IN ({OPEN_GROUPS})"
UNDECIDED_GROUPS = (
    "SELECT group_id FROM groups WHERE due LIKE :named AND NOT EXISTS (SELECT 1 FROM fates "
    "WHERE fates.consumer = :policy AND fates.group_id = groups.group_id)"
)
_VERSIONS = msgspec.json.Decoder(tuple[tuple[int, int], ...])
_REWARDS = msgspec.json.Decoder(tuple[float, ...])


# --- partition --------------------------------------------------------------------------------


def restore_partition(partition: Partition, tables: Tables, now: float) -> None:
    def of_open_groups(kind: type[R]) -> list[R]:
        return tables.read(kind, IN_OPEN_GROUPS, partition=partition.index)

    leases = of_open_groups(LeaseRecord)
    partition.restore(
        groups=of_open_groups(GroupRecord),
        grants=of_open_groups(GrantRecord),
        leases=sorted(leases, key=lambda lease: (lease.group_id, lease.slot, lease.epoch)),
        rows=of_open_groups(RowRecord),
        nodes=tables.read(NodeRecord, 'NOT "left"'),
        dead=of_open_groups(DeadSlotRecord),
        quarantined=_quarantined(tables),
        now=now,
    )


def _quarantined(tables: Tables) -> set[str]:
    return {
        *map(
            parse_quarantine,
            tables.read(MetaRecord, "key LIKE :keys", keys=f"{QUARANTINE_PREFIX}%"),
        )
    }


def restore_completion(host: PartitionRuntime, tables: Tables) -> None:
    """Restore closed groups that wait for columns, and the columns of all rows that are not
    final."""
    if not host.completion.is_needed:
        return
    stages = tables.read(CompletionRecord, "state != :done", done=Stage.DONE.value)
    waiting = {record.group_id for record in stages}
    rows: defaultdict[GroupId, list[RowRecord]] = defaultdict(list)
    row_ids: list[RowId] = []
    opened = tables.rows(OPEN_GROUPS, partition=host.partition.index)
    for group_id in sorted(waiting | {GroupId(group_id) for (group_id,) in opened}):
        for row in tables.read(RowRecord, "group_id = :group_id", group_id=group_id):
            row_ids.append(row.row_id)
            if group_id in waiting and Outcome(kind=row.summary.outcome).has_reward:
                rows[group_id].append(row)
    where = "space = 'train' AND row_id IN :ids AND name IN :names"
    columns = tables.read(ColumnRecord, where, ids=row_ids, names=sorted(host.completion.names))
    host.completion.restore(
        {
            group_id: tuple(row.summary for row in sorted(rows[group_id], key=lambda r: r.slot))
            for group_id in waiting
        },
        stages,
        [
            ColumnCompleted(
                row_id=column.row_id,
                name=column.name,
                failed=column.failed,
                value=column.value,
                digest=column.digest,
            )
            for column in columns
        ],
    )


# --- coordinator ------------------------------------------------------------------------------


def load_rule_states(tables: Tables) -> dict[str, dict[str, Any]]:
    memories: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for record in tables.read(RuleStateRecord):
        memories[record.rule][record.key] = msgspec.json.decode(record.value)
    return dict(memories)


def restore_coordinator(coordinator: Coordinator, tables: Tables, now: float) -> None:
    """Restore everything except groups that wait for a batch: enough for running work to
    continue."""
    sources = tables.read(SourceRecord)
    coordinator.supply.restore(sources)
    coordinator.restore(
        num_issued=sum(source.next_ordinal - source.skipped for source in sources),
        open_groups=_read_open_groups(tables, coordinator.consumers),
    )
    for consumer in coordinator.consumers.values():
        restore_lineage(consumer.lineage, tables)
        for kept in tables.read(MetaRecord, "key = :key", key=yield_key(consumer.terms.policy)):
            consumer.expected_yield = float(kept.value)
        _restore_sealed(consumer, tables)
    for lineage in coordinator.frozen.values():
        restore_lineage(lineage, tables)
    coordinator.gone = {
        RowId(key.removeprefix(FORGOTTEN_PREFIX))
        for (key,) in tables.rows(
            "SELECT key FROM meta WHERE key LIKE :keys", keys=f"{FORGOTTEN_PREFIX}%"
        )
    }
    coordinator.quarantined = _quarantined(tables)
    for kept in tables.read(MetaRecord, "key LIKE :keys", keys=f"{CHECKS_PREFIX}%"):
        coordinator.spot_checks.restore(kept)
    for kept in tables.read(MetaRecord, "key = :key", key=FAILURES_KEY):
        coordinator.failure_limit.restore(kept.value, now)
    if coordinator.evaluations is not None:
        _restore_evaluations(coordinator.evaluations, tables)
    coordinator.waste.tokens = {record.reason: record.tokens for record in tables.read(WasteRecord)}


def _restore_evaluations(evaluations: Evaluations, tables: Tables) -> None:
    def issued(one: EvaluationRecord) -> list[GroupRecord]:
        named = f"p%-e{one.incarnation}-{one.number}-%"
        return tables.read(GroupRecord, "group_id LIKE :named", named=named)

    evaluations.restore(
        tables.read(EvaluationRecord), issued, lambda one: read_evaluated(tables, one)
    )


def read_evaluated(tables: Tables, one: EvaluationRecord) -> list[EvaluatedRecord]:
    """The ended questions of an evaluation, in the order of its suites."""
    where = "policy = :policy AND incarnation = :incarnation AND number = :number"
    found = tables.read(
        EvaluatedRecord,
        where,
        policy=one.policy,
        incarnation=one.incarnation,
        number=one.number,
    )
    suites = [*one.suites]
    return sorted(found, key=lambda record: (suites.index(record.suite), record.ordinal))


def _read_open_groups(
    tables: Tables, policies: Iterable[PolicyName]
) -> Iterator[tuple[GroupRecord, set[PolicyName]]]:
    """Groups that some policy has not judged, with these policies, in order of issue. A policy that
    was added later has no part in the groups issued before it."""
    undecided: defaultdict[str, set[PolicyName]] = defaultdict(set)
    for policy in policies:
        for (group_id,) in tables.rows(UNDECIDED_GROUPS, policy=policy, named=f'%"{policy}"%'):
            undecided[group_id].add(policy)
    found = tables.read(GroupRecord, "group_id IN :ids", ids=[*undecided])
    for record in sorted(found, key=lambda record: record.issue):
        if policies_left := undecided[record.group_id] & msgspec.json.decode(record.due).keys():
            yield record, policies_left


def restore_ready_groups(coordinator: Coordinator, tables: Tables) -> list[GroupId]:
    """Restore the groups that wait for a batch, and their holders; returns groups without any
    holder left. Thread-safe while no request reaches the coordinator."""
    for consumer in coordinator.consumers.values():
        _restore_groups(consumer, tables)
    return _restore_retention(coordinator, tables)


def restore_lineage(lineage: Lineage, tables: Tables) -> None:
    incarnation_records = tables.read(IncarnationRecord, "policy = :policy", policy=lineage.policy)
    commits: defaultdict[int, list[CommitRecord]] = defaultdict(list)
    for commit in tables.read(CommitRecord, "consumer = :policy", policy=lineage.policy):
        commits[commit.incarnation].append(commit)
    for incarnation_record in sorted(incarnation_records, key=lambda record: record.incarnation):
        lineage.apply_incarnation(incarnation_record)
        own = commits[incarnation_record.incarnation]
        for commit in sorted(own, key=lambda record: record.seq):
            lineage.apply_commit(commit)
    versions = tables.read(VersionRecord, "policy = :policy", policy=lineage.policy)
    for version in sorted(versions, key=lambda record: (record.incarnation, record.number)):
        lineage.apply_version(version)


def _restore_sealed(consumer: Consumer, tables: Tables) -> None:
    policy, lineage = consumer.terms.policy, consumer.lineage
    last = tables.scalar("SELECT max(seq) FROM batches WHERE consumer = :policy", policy=policy)
    consumer.last_sealed = int(last or 0)
    ahead = tables.rows(
        "SELECT seq, num_groups - num_replayed FROM batches "
        "WHERE consumer = :policy AND seq > :seq",
        policy=policy,
        seq=lineage.seq,
    )
    consumer.sealed = {int(seq): int(n) for seq, n in ahead}
    newest = tables.read(
        BatchRecord, "consumer = :policy AND seq = :seq", policy=policy, seq=consumer.last_sealed
    )
    consumer.newest_batch = newest[0] if newest else None
    consumer.instalments = read_instalments(tables, policy, consumer.last_sealed + 1)
    if consumer.instalments:
        num_groups = sum(one.num_groups for one in consumer.instalments)
        consumer.sealed[consumer.last_sealed + 1] = num_groups


def read_instalments(tables: Tables, policy: PolicyName, seq: int) -> list[InstalmentRecord]:
    """The instalments of a batch in their order; none if it was not streamed."""
    where = "consumer = :policy AND seq = :seq"
    found = tables.read(InstalmentRecord, where, policy=policy, seq=seq)
    return sorted(found, key=lambda record: record.instalment)


WAITING = """
SELECT arrival, group_id, task_key, source, tokens, rewards, versions, uses, seq, is_complete,
  number FROM fates WHERE consumer = :policy AND state = :state
AND (state = 'admitted' OR length(packed_rows) > 0)
"""


@contextmanager
def _gc_disabled() -> Generator[None]:
    """The loaded objects all stay alive: the collector would only traverse them repeatedly."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _restore_groups(consumer: Consumer, tables: Tables) -> None:
    """Admitted groups in order of arrival, and the replay pool; their rows stay in the ledger."""
    policy = consumer.terms.policy
    arrived = tables.scalar("SELECT max(arrival) FROM fates WHERE consumer = :p", p=policy)
    consumer.num_arrived = int(arrived or 0)
    states = (FateState.ADMITTED, FateState.SEALED) if consumer.has_pool else (FateState.ADMITTED,)
    with _gc_disabled():
        for state in states:
            _restore_waiting(consumer, tables, state)


def _restore_waiting(consumer: Consumer, tables: Tables, state: FateState) -> None:
    found = tables.rows(WAITING, policy=consumer.terms.policy, state=state.value)
    found.sort(key=itemgetter(0))  # the database would sort complete rows, on disk
    seen: dict[str, tuple[tuple[int, int], ...]] = {}
    for arrival, group_id, task_key, source, tokens, rewards, text, *others in found:
        uses, seq, is_complete, number = others
        versions = seen.get(text)
        if versions is None:  # most are equal, so equal ones share one tuple
            versions = seen[text] = _VERSIONS.decode(text)
        group = FateRecord(
            consumer=consumer.terms.policy,
            group_id=group_id,
            task_key=task_key,
            source=source,
            state=state,
            arrival=arrival,
            number=number,
            tokens=tokens,
            rewards=_REWARDS.decode(rewards),
            versions=versions,
            seq=seq,
            uses=uses,
            is_complete=bool(is_complete),
        )
        if state is FateState.SEALED:
            consumer.pool[group_id] = group
        else:
            (consumer.ready if is_complete else consumer.incomplete)[group_id] = group


def load_group_rows(
    tables: Tables, policy: PolicyName, group_ids: Sequence[GroupId]
) -> dict[GroupId, bytes]:
    """The rows of waiting groups that a restart left in the ledger."""
    where = "consumer = :policy AND group_id IN :ids"
    fates = tables.read(FateRecord, where, policy=policy, ids=[*group_ids])
    return {fate.group_id: fate.packed_rows for fate in fates}


def _restore_retention(coordinator: Coordinator, tables: Tables) -> list[GroupId]:
    undecided: list[GroupId] = []
    for consumer in coordinator.consumers.values():
        undecided += [*consumer.ready, *consumer.incomplete]
    for group_id, record in coordinator.open.items():
        undecided += [group_id] * len(coordinator.undecided(record))
    retained = {
        PolicyName(policy): min((seq for _, seq in msgspec.json.decode(text)), default=None)
        for policy, text in tables.rows("SELECT policy, retained FROM checkpoints")
    }
    return coordinator.retention.restore(
        undecided=undecided,
        batches={policy: read_retained_batches(tables, policy) for policy in coordinator.consumers},
        pools={policy: consumer.pool for policy, consumer in coordinator.consumers.items()},
        cursors={
            policy: (consumer.lineage.seq, retained.get(policy))
            for policy, consumer in coordinator.consumers.items()
        },
    )


def restore_link(link: Link[Any, Any], tables: Tables) -> None:
    link.restore(tables.read(LinkRecord), tables.read(MessageRecord))
