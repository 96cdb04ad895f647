# SPDX-License-Identifier: Apache-2.0
"""A ledger as a long run leaves it: so many admitted groups that wait for their batch, each with
its leases, rows and fate, written in bulk past the service. Their payload is not there: nothing
reads it before a trainer fetches it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from benchmarks.client import NODE, POLICY
from penstock.dataflow.ledger.tables import open_tables
from penstock.dataflow.records import (
    FateRecord,
    FateState,
    GrantRecord,
    GroupRecord,
    GroupState,
    IncarnationRecord,
    LeaseEnd,
    MetaRecord,
    NodeRecord,
    Record,
    RowRecord,
    SourceRecord,
    VersionRecord,
    row_id,
)
from penstock.dataflow.sources import open_source
from penstock.types import GroupId, OutcomeKind, PolicyName, RowSummary

SOURCE, TASK = "train", "penstock.tasks.reverse"
SESSION = "a life before"
TOKENS, PAYLOAD_BYTES, ROWS_PER_SEGMENT = 512, 72_000, 3_700
RECORDS_PER_COMMIT = 40_000
AT = 1_700_000_000.0


def fill(folder: Path, *, num_groups: int, group_size: int, incarnation: int = 1) -> None:
    """Closed and admitted groups of one policy whose trainer has published version 0."""
    folder.mkdir(parents=True)
    tables = open_tables(folder)
    tables.commit(_facts(num_groups, group_size, incarnation))
    made = _groups(num_groups, group_size, incarnation)
    while records := [*islice(made, RECORDS_PER_COMMIT)]:
        tables.commit(records)
    tables.close()


def _facts(num_groups: int, group_size: int, incarnation: int) -> list[Record]:
    rows = num_groups * group_size
    passed = {"sequences": rows, "tokens": rows * TOKENS}
    totals = {POLICY: {"produced": passed, "entered": passed}}
    return [
        MetaRecord(key="report", value=msgspec.json.encode(totals).decode()),
        SourceRecord(name=SOURCE, next_ordinal=num_groups),
        NodeRecord(
            node_id=NODE,
            boot_id=SESSION,
            capacity=1024,
            policies="[]",
            tags="[]",
            left=False,
            at=AT,
        ),
        IncarnationRecord(
            policy=POLICY, incarnation=incarnation, number=0, seq=0, request_id="first", at=AT
        ),
        VersionRecord(
            policy=POLICY,
            incarnation=incarnation,
            number=0,
            manifest_digest="0" * 64,
            weights_digest="0",
            at=AT,
        ),
    ]


def _groups(num_groups: int, group_size: int, incarnation: int) -> Iterator[Record]:
    source = open_source(SOURCE, TASK)
    versions = {POLICY: ((incarnation, 0),)}
    for index in range(num_groups):
        task = source.task(index, seed=0, workflow="single_turn")
        group_id = GroupId(f"p0-{index + 1}")
        yield GroupRecord(
            group_id=group_id,
            partition=0,
            issue=index + 1,
            source=SOURCE,
            ordinal=index,
            task_key=task.key,
            task=msgspec.json.encode(task).decode(),
            num_slots=group_size,
            due=f'{{"{POLICY}":0}}',
            why='{"mix":"weights","skipped":0,"forced_over":null}',
            state=GroupState.CLOSED,
            reason="",
            issued_at=AT,
            ended_at=AT + 20,
        )
        rows = [
            _row(group_id, slot, index * group_size + slot, versions) for slot in range(group_size)
        ]
        yield from rows
        grant = _grant(group_id, group_size)
        yield grant
        yield from (grant.lease(slot, LeaseEnd.DELIVERED, AT + 20) for slot in grant.slots)
        yield _fate(group_id, index, task.key, rows, incarnation)


def _row(
    group_id: GroupId,
    slot: int,
    number: int,
    versions: Mapping[PolicyName, tuple[tuple[int, int], ...]],
) -> RowRecord:
    segment, position = divmod(number, ROWS_PER_SEGMENT)
    return RowRecord(
        summary=RowSummary(
            row_id=row_id(group_id, slot, 1),
            digest=f"{number:064x}",
            outcome=OutcomeKind.COMPLETED,
            reward=float(slot % 2),
            sampled={POLICY: TOKENS},
            versions=versions,
        ),
        group_id=group_id,
        slot=slot,
        epoch=1,
        node_id=NODE,
        segment=segment + 1,
        offset=position * PAYLOAD_BYTES,
        length=PAYLOAD_BYTES,
        delivered_at=AT + 20,
        arrival=number + 1,
    )


def _grant(group_id: GroupId, num_slots: int) -> GrantRecord:
    return GrantRecord(
        group_id=group_id,
        slot=0,
        epoch=1,
        num_slots=num_slots,
        attempt=1,
        node_id=NODE,
        boot_id=SESSION,
        request_id="0" * 32,
        granted_at=AT,
    )


def _fate(
    group_id: GroupId, index: int, task_key: str, rows: Sequence[RowRecord], incarnation: int
) -> FateRecord:
    return FateRecord(
        consumer=POLICY,
        group_id=group_id,
        state=FateState.ADMITTED,
        reason="",
        rule="all",
        seq=0,
        tokens=TOKENS * len(rows),
        at=AT + 20,
        arrival=index + 1,
        packed_rows=msgspec.msgpack.encode([row.summary for row in rows]),
        task_key=task_key,
        source=SOURCE,
        rewards=tuple(row.summary.reward or 0.0 for row in rows),
        versions=((incarnation, 0),),
    )
