# SPDX-License-Identifier: Apache-2.0
"""The recorded tasks and their outcomes; used instead of sources and nodes.

A task that was never rolled out has no outcome, and none is invented."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import structs

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.core.task_supply import TaskSupply
from penstock.dataflow.ledger.recorded import RecordedRun
from penstock.dataflow.records import (
    CommitRecord,
    DecisionRecord,
    FateRecord,
    GroupRecord,
    GroupState,
    IncarnationRecord,
    RowRecord,
)
from penstock.dataflow.sources import Source
from penstock.types import DropReason, GroupId, Outcome, PolicyName, RowId, RowSummary, Task

TaskPosition = tuple[str, int]
"""A task's source and its ordinal there."""
UNFINISHED_REASONS = (DropReason.REMAINDER, DropReason.PARTITION_LOST, DropReason.FORGOTTEN)
"""Drop reasons that are not caused by the group itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """One recorded group, and how it ended."""

    issued_at: float
    ended_at: float | None
    """None if it was unfinished when the record ended."""
    rows: tuple[RowSummary, ...]
    delivered_at: tuple[float, ...]
    """Time of each row."""
    dropped: DropReason | None
    arrival: int
    """Order in which it was judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTasks:
    """All tasks and groups of a recorded run."""

    groups: Mapping[TaskPosition, RecordedGroup]
    tasks: Mapping[TaskPosition, Task]
    num_issued: Mapping[str, int]
    """Tasks taken from each source."""
    numbers: Mapping[PolicyName, Sequence[tuple[float, int]]]
    """History of each policy's version: (time, number)."""

    def number_at(self, policy: PolicyName, at: float) -> int:
        moves = self.numbers.get(policy, ())
        index = bisect_right(moves, at, key=lambda move: move[0])
        return moves[index - 1][1] if index else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSource(Source):
    """A source of recorded tasks; needs no user code."""

    tasks: Mapping[TaskPosition, Task] = field(default_factory=dict[TaskPosition, Task])

    def task(self, ordinal: int, *, seed: int, workflow: str) -> Task:
        return self.tasks[self.name, ordinal]


class RecordedSupply(TaskSupply):
    """Ends with the record, which is not the same as an exhausted source."""

    def limit_to(self, limits: Mapping[str, int | None]) -> None:
        """Total number of tasks by source, from the config."""
        self._limits = limits

    def has_ended(self, source: str) -> bool:
        limit = self._limits[source]
        is_over = limit is not None and self._served[source] >= limit
        return is_over and super().has_ended(source)


def read_recorded_tasks(recorded: RecordedRun, policies: Iterable[PolicyName]) -> RecordedTasks:
    coordinator = recorded.coordinator
    rows: defaultdict[GroupId, list[RowRecord]] = defaultdict(list)
    for tables in (coordinator, *recorded.partitions.values()):
        for row in tables.read(RowRecord, "space = 'train'"):
            if Outcome(kind=row.summary.outcome).has_reward:
                rows[row.group_id].append(row)
    arrivals = {fate.group_id: fate.arrival for fate in coordinator.read(FateRecord)}
    rewards = _reward_columns(recorded)
    recorded_groups: dict[TaskPosition, RecordedGroup] = {}
    tasks: dict[TaskPosition, Task] = dict(
        _skipped_tasks(coordinator.read(DecisionRecord, "hook = 'curate'"))
    )
    for group in recorded.groups():
        position = (group.source, group.ordinal)
        tasks[position] = msgspec.json.decode(group.task, type=Task)
        members = sorted(rows[group.group_id], key=lambda row: row.slot)
        recorded_groups[position] = _recorded_group(
            group, members, rewards, arrivals.get(group.group_id, 0)
        )
    num_issued = coordinator.rows("SELECT name, next_ordinal FROM sources")
    return RecordedTasks(
        groups=recorded_groups,
        tasks=tasks,
        num_issued={str(name): int(count) for name, count in num_issued},
        numbers={policy: _version_history(recorded, policy) for policy in policies},
    )


def _recorded_group(
    group: GroupRecord,
    rows: Sequence[RowRecord],
    rewards: Mapping[RowId, ColumnRecord],
    arrival: int,
) -> RecordedGroup:
    dropped = DropReason(group.reason) if group.reason else None
    scored = [
        rewards[row.row_id] for row in rows if row.summary.reward is None and row.row_id in rewards
    ]
    is_over = group.state != GroupState.OPEN and dropped not in UNFINISHED_REASONS
    is_over = is_over and all(
        row.summary.reward is not None or row.row_id in rewards for row in rows
    )
    return RecordedGroup(
        issued_at=group.issued_at,
        ended_at=max([group.ended_at, *(column.at for column in scored)]) if is_over else None,
        rows=tuple(_summary(row, rewards) for row in rows),
        delivered_at=tuple(row.delivered_at for row in rows),
        dropped=dropped,
        arrival=arrival,
    )


def _summary(row: RowRecord, rewards: Mapping[RowId, ColumnRecord]) -> RowSummary:
    column = rewards.get(row.row_id)
    if row.summary.reward is not None or column is None:
        return row.summary
    return structs.replace(row.summary, reward=column.value)


def _reward_columns(recorded: RecordedRun) -> dict[RowId, ColumnRecord]:
    """Rewards written by a stage."""
    where = "name = 'reward' AND failed = '' AND value IS NOT NULL"
    return {
        column.row_id: column
        for tables in (recorded.coordinator, *recorded.partitions.values())
        for column in tables.read(ColumnRecord, where)
    }


def _skipped_tasks(decisions: Iterable[DecisionRecord]) -> Iterable[tuple[TaskPosition, Task]]:
    """The record has the key and position of a skipped task, not its content."""
    for record in decisions:
        detail = msgspec.json.decode(record.detail)
        if record.verdict == "skipped":
            source, ordinal = str(detail["source"]), int(detail["ordinal"])
            yield (
                (source, ordinal),
                Task(
                    key=record.subject,
                    source=source,
                    ordinal=ordinal,
                    payload={},
                    workflow="",
                    seed=0,
                ),
            )


def _version_history(recorded: RecordedRun, policy: PolicyName) -> list[tuple[float, int]]:
    incarnation_records = recorded.coordinator.read(
        IncarnationRecord, "policy = :policy", policy=policy
    )
    commits = recorded.coordinator.read(CommitRecord, "consumer = :policy", policy=policy)
    return sorted((record.at, record.number) for record in (*incarnation_records, *commits))
