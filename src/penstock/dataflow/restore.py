# SPDX-License-Identifier: Apache-2.0
"""A service's next life: read from the ledger what home and the partition must hold in memory.

Only open and unsealed groups are materialised; everything older is answered by SQL when somebody
asks.
"""

from __future__ import annotations

from collections import defaultdict

from penstock.dataflow.consumers import Consumer
from penstock.dataflow.home import Home
from penstock.dataflow.partition import Partition
from penstock.dataflow.records import (
    BatchRecord,
    CommitRecord,
    GroupRecord,
    IncarnationRecord,
    LeaseRecord,
    NodeRecord,
    Report,
    RowRecord,
    VersionRecord,
)
from penstock.dataflow.tables import Tables
from penstock.types import GroupId, RowSummary

SERVED = "SELECT name, next_ordinal FROM sources"
OF_OPEN_GROUPS = "group_id IN (SELECT group_id FROM groups WHERE state = 'open')"


def restore_partition(partition: Partition, tables: Tables, now: float) -> list[Report]:
    leases = tables.read(LeaseRecord, OF_OPEN_GROUPS)
    return partition.restore(
        groups=tables.read(GroupRecord, "state = 'open'"),
        leases=sorted(leases, key=lambda lease: (lease.group_id, lease.slot, lease.epoch)),
        rows=tables.read(RowRecord, OF_OPEN_GROUPS),
        nodes=tables.read(NodeRecord, 'NOT "left"'),
        now=now,
    )


def restore_home(home: Home, tables: Tables) -> None:
    home.restore(
        served={str(name): int(n) for name, n in tables.rows(SERVED)},
        num_issued=int(tables.scalar("SELECT max(issue) FROM groups") or 0),
        open_groups=[
            GroupId(group_id)
            for (group_id,) in tables.rows("SELECT group_id FROM groups WHERE state = 'open'")
        ],
    )
    for consumer in home.consumers.values():
        _restore_consumer(home, consumer, tables)
    wasted = tables.rows(
        "SELECT reason, sum(tokens) FROM fates WHERE state = 'dropped' GROUP BY reason"
    )
    home.wasted_tokens = {str(reason): int(tokens) for reason, tokens in wasted}


def _restore_consumer(home: Home, consumer: Consumer, tables: Tables) -> None:
    policy, lineage = consumer.terms.policy, consumer.lineage
    lives = tables.read(IncarnationRecord, "policy = :policy", policy=policy)
    commits = tables.read(CommitRecord, "consumer = :policy", policy=policy)
    for life in sorted(lives, key=lambda record: record.incarnation):
        lineage.apply_incarnation(life)
        for commit in sorted(commits, key=lambda record: record.seq):
            lineage.apply_commit(commit)
    versions = tables.read(VersionRecord, "policy = :policy", policy=policy)
    for version in sorted(versions, key=lambda record: (record.incarnation, record.number)):
        lineage.apply_version(version)
    sealed = tables.rows(
        "SELECT seq, num_groups FROM batches WHERE consumer = :policy ORDER BY seq", policy=policy
    )
    consumer.last_sealed = max((int(seq) for seq, _ in sealed), default=0)
    consumer.sealed = {int(seq): int(n) for seq, n in sealed if seq > lineage.seq}
    newest = tables.read(
        BatchRecord, "consumer = :policy AND seq = :seq", policy=policy, seq=consumer.last_sealed
    )
    consumer.newest_batch = newest[0] if newest else None
    _restore_ready(home, consumer, tables)


def _restore_ready(home: Home, consumer: Consumer, tables: Tables) -> None:
    policy = consumer.terms.policy
    admitted = tables.rows(
        "SELECT f.group_id, g.task_key FROM fates f JOIN groups g ON g.group_id = f.group_id "
        "WHERE f.consumer = :policy AND f.state = 'admitted' ORDER BY f.at",
        policy=policy,
    )
    rows: defaultdict[GroupId, list[RowRecord]] = defaultdict(list)
    for row in tables.read(
        RowRecord,
        "reward IS NOT NULL AND group_id IN (SELECT group_id FROM fates "
        "WHERE consumer = :policy AND state = 'admitted')",
        policy=policy,
    ):
        rows[row.group_id].append(row)

    def summaries(group_id: GroupId) -> tuple[RowSummary, ...]:
        members = sorted(rows[group_id], key=lambda row: row.slot)
        found = (row.summary for row in members)
        return tuple(row for row in found if row.sampled.get(policy, 0) > 0)

    home.restore_ready(
        consumer,
        [(GroupId(g), str(key), summaries(GroupId(g))) for g, key in admitted],
    )
