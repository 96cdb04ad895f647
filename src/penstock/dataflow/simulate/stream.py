# SPDX-License-Identifier: Apache-2.0
"""The record as a supply of tasks and of what became of them: it stands in for sources and nodes.

A task that was never rolled out has no outcome here, and none is invented."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

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
    IssuedRecord,
    RowRecord,
)
from penstock.dataflow.sources import Source
from penstock.types import DropReason, GroupId, Outcome, PolicyName, RowId, RowSummary, Task

TaskPosition = tuple[str, int]
"""A task's place in the prompt stream: its source, its ordinal there."""
UNFINISHED_REASONS = (DropReason.REMAINDER, DropReason.PARTITION_LOST, DropReason.FORGOTTEN)
"""Ends that say nothing about the group itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedGroup:
    """One group of the record, and how it ended."""

    issued: IssuedRecord
    ended_at: float | None
    """None: it had no end of its own when the record ended."""
    rows: tuple[RowSummary, ...]
    delivered_at: tuple[float, ...]
    """Of each row."""
    dropped: DropReason | None
    arrival: int
    """Order in which it was judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTasks:
    ended: Mapping[TaskPosition, RecordedGroup]
    tasks: Mapping[TaskPosition, Task]
    served: Mapping[str, int]
    """Tasks that the record took of each source."""
    numbers: Mapping[PolicyName, Sequence[tuple[float, int]]]
    """When each policy stood at which number."""

    def number_at(self, policy: PolicyName, at: float) -> int:
        moves = self.numbers.get(policy, ())
        index = bisect_right(moves, at, key=lambda move: move[0])
        return moves[index - 1][1] if index else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSource(Source):
    """Gives the tasks of the record; needs none of the user's own code."""

    tasks: Mapping[TaskPosition, Task] = field(default_factory=dict[TaskPosition, Task])

    def task(self, ordinal: int, *, seed: int, workflow: str) -> Task:
        return self.tasks[self.name, ordinal]


class RecordedSupply(TaskSupply):
    """Ends where the record does; that alone does not end the run."""

    def limit_to(self, limits: Mapping[str, int | None]) -> None:
        """By source: tasks that it has in all."""
        self._limits = limits

    @property
    def is_exhausted(self) -> bool:
        return super().is_exhausted and all(
            limit is not None and self._served[name] >= limit
            for name, limit in self._limits.items()
        )


def read_recorded_tasks(recorded: RecordedRun, policies: Iterable[PolicyName]) -> RecordedTasks:
    coordinator = recorded.coordinator
    issued = coordinator.read(IssuedRecord)
    groups: dict[GroupId, GroupRecord] = {}
    rows: defaultdict[GroupId, list[RowRecord]] = defaultdict(list)
    for tables in (coordinator, *recorded.partitions.values()):
        groups |= {group.group_id: group for group in tables.read(GroupRecord)}
        for row in tables.read(RowRecord, "space = 'train'"):
            if Outcome(kind=row.summary.outcome).has_reward:
                rows[row.group_id].append(row)
    arrivals = {fate.group_id: fate.arrival for fate in coordinator.read(FateRecord)}
    rewards = _reward_columns(recorded)
    ended: dict[TaskPosition, RecordedGroup] = {}
    tasks: dict[TaskPosition, Task] = dict(
        _skipped_tasks(coordinator.read(DecisionRecord, "hook = 'curate'"))
    )
    for one in issued:
        place, group = (one.source, one.ordinal), groups.get(one.group_id)
        if group is None:
            tasks[place] = _placeholder_task(one.task_key, place)
            continue
        tasks[place] = msgspec.json.decode(group.task, type=Task)
        members = sorted(rows[one.group_id], key=lambda row: row.slot)
        ended[place] = _recorded_group(one, group, members, rewards, arrivals.get(one.group_id, 0))
    served = coordinator.rows("SELECT name, next_ordinal FROM sources")
    return RecordedTasks(
        ended=ended,
        tasks=tasks,
        served={str(name): int(count) for name, count in served},
        numbers={policy: _version_history(recorded, policy) for policy in policies},
    )


def _recorded_group(
    issued: IssuedRecord,
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
        issued=issued,
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
    return replace(row.summary, reward=column.value)


def _reward_columns(recorded: RecordedRun) -> dict[RowId, ColumnRecord]:
    """Rewards that a stage wrote."""
    where = "name = 'reward' AND failed = '' AND value IS NOT NULL"
    return {
        column.row_id: column
        for tables in (recorded.coordinator, *recorded.partitions.values())
        for column in tables.read(ColumnRecord, where)
    }


def _skipped_tasks(decisions: Iterable[DecisionRecord]) -> Iterable[tuple[TaskPosition, Task]]:
    """Of a skipped task the record knows its name and place, not its content."""
    for record in decisions:
        detail = msgspec.json.decode(record.detail)
        if record.verdict == "skipped":
            place = (str(detail["source"]), int(detail["ordinal"]))
            yield place, _placeholder_task(record.subject, place)


def _placeholder_task(key: str, place: TaskPosition) -> Task:
    return Task(key=key, source=place[0], ordinal=place[1], payload={}, workflow="", seed=0)


def _version_history(recorded: RecordedRun, policy: PolicyName) -> list[tuple[float, int]]:
    incarnation_records = recorded.coordinator.read(
        IncarnationRecord, "policy = :policy", policy=policy
    )
    commits = recorded.coordinator.read(CommitRecord, "consumer = :policy", policy=policy)
    return sorted((record.at, record.number) for record in (*incarnation_records, *commits))
