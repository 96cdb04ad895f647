# SPDX-License-Identifier: Apache-2.0
"""Holds back closed groups whose rows miss columns, per policy, until stages have written the
columns or have failed to.

Sits between a partition and the coordinator. A policy judges a group once the columns its rules
need are present, and trains on it once its trainer's columns are. One policy's missing scorer
delays no other policy.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import structs

from penstock.dataflow.core.groups import ClosingPolicy
from penstock.dataflow.core.ids import is_evaluation
from penstock.dataflow.core.messages import ColumnsCompleted, GroupEnded, SendToCoordinator
from penstock.dataflow.core.names import REWARD
from penstock.dataflow.records import CompletionRecord, Deletion, Journal
from penstock.types import DropReason, GroupId, PolicyName, RowId, RowSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredColumns:
    """Columns that stages add and one policy needs."""

    judge: frozenset[str] = frozenset()
    """Needed before its rules can decide."""
    train: frozenset[str] = frozenset()
    """Needed before its trainer can use an admitted group."""
    is_scored_by_nodes: bool = False
    """Trusted nodes give the reward: only a row without one needs the column."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnCompleted:
    """A column has a value or has failed for good."""

    row_id: RowId
    name: str
    failed: str
    """Kind of failure; empty for a value."""
    value: float | None
    digest: str


class Stage(StrEnum):
    JUDGING = "judging"
    REPORTED = "reported"
    TRAINING = "training"
    DONE = "done"


@dataclass(slots=True)
class _PendingGroup:
    rows: tuple[RowSummary, ...]
    stages: dict[PolicyName, Stage] = field(default_factory=dict[PolicyName, Stage])


class Completion:
    def __init__(
        self,
        needs: Mapping[PolicyName, RequiredColumns],
        closing: ClosingPolicy,
        journal: Journal,
        send: SendToCoordinator,
    ) -> None:
        self._needs = needs
        self.is_scored = not any(
            REWARD in need.judge and not need.is_scored_by_nodes for need in needs.values()
        )
        """Rows of trusted nodes arrive with their reward; no stage writes it."""
        self.names = frozenset(name for need in needs.values() for name in need.judge | need.train)
        """Columns that some policy needs; others are not kept here."""
        self.is_needed = bool(self.names)
        self._closing = closing
        self._journal = journal
        self._send = send
        self._groups: dict[GroupId, _PendingGroup] = {}
        self._completed: dict[RowId, dict[str, ColumnCompleted]] = {}
        self._group_of: dict[RowId, GroupId] = {}

    # --- events -------------------------------------------------------------------------------

    def report(self, report: GroupEnded, now: float) -> None:
        """Handle an ended group: report it immediately for every policy that misses no column."""
        is_final = report.dropped is not None or is_evaluation(report.group_id)
        if not self.is_needed or is_final:
            self._send(report)
            self._forget_rows(row.row_id for row in report.rows)
            return
        waiting = self._groups[report.group_id] = _PendingGroup(report.rows)
        for row in report.rows:
            self._group_of[row.row_id] = report.group_id
        for policy in self._needs:
            self._move(report.group_id, waiting, policy, Stage.JUDGING, now)
        self._advance(report.group_id, now)

    def completed(
        self, events: Iterable[ColumnCompleted], open_groups: Container[GroupId], now: float
    ) -> None:
        """Columns may come before their group ends; columns of groups that are final change
        nothing."""
        for event in events:
            if event.name not in self.names:
                continue
            group_id = self._group_of.get(event.row_id)
            if group_id is None and GroupId(event.row_id.partition(".")[0]) not in open_groups:
                continue
            self._completed.setdefault(event.row_id, {})[event.name] = event
            if group_id is not None:
                self._advance(group_id, now)

    def admitted(self, group_id: GroupId, policy: PolicyName, now: float) -> None:
        waiting = self._groups.get(group_id)
        if waiting is None or not self._needs[policy].train:
            return
        self._move(group_id, waiting, policy, Stage.TRAINING, now)
        self._advance(group_id, now)

    def forget(self, group_ids: Iterable[GroupId]) -> None:
        """Forget groups that are final for every consumer."""
        for group_id in group_ids:
            waiting = self._groups.pop(group_id, None)
            if waiting is not None:
                self._forget_rows(row.row_id for row in waiting.rows)
            if self.is_needed:
                self._journal(
                    Deletion(
                        kind=CompletionRecord,
                        where="group_id = :group_id",
                        values={"group_id": group_id},
                    )
                )

    def rows_of(self, group_id: GroupId) -> tuple[RowId, ...]:
        waiting = self._groups.get(group_id)
        return () if waiting is None else tuple(row.row_id for row in waiting.rows)

    def _forget_rows(self, row_ids: Iterable[RowId]) -> None:
        for row_id in row_ids:
            self._completed.pop(row_id, None)
            self._group_of.pop(row_id, None)

    # --- completeness -------------------------------------------------------------------------

    def _advance(self, group_id: GroupId, now: float) -> None:
        waiting = self._groups[group_id]
        for policy, stage in [*waiting.stages.items()]:
            need = self._needs[policy]
            if stage is Stage.JUDGING and self._is_terminal(waiting.rows, need.judge):
                rows, dropped = self._complete_rows(waiting.rows, policy, need.judge)
                self._move(group_id, waiting, policy, Stage.REPORTED, now)
                self._send(
                    GroupEnded(group_id=group_id, policies=(policy,), rows=rows, dropped=dropped)
                )
            elif stage is Stage.TRAINING and self._is_terminal(waiting.rows, need.train):
                rows, dropped = self._complete_rows(waiting.rows, policy, need.judge | need.train)
                self._move(group_id, waiting, policy, Stage.DONE, now)
                self._send(
                    ColumnsCompleted(group_id=group_id, policy=policy, rows=rows, dropped=dropped)
                )

    def _is_terminal(self, rows: Iterable[RowSummary], names: frozenset[str]) -> bool:
        return all(
            self._missing(row, names) <= self._completed.get(row.row_id, {}).keys() for row in rows
        )

    def _missing(self, row: RowSummary, names: frozenset[str]) -> frozenset[str]:
        """Of these columns, those that did not come with the row. Where a stage scores every row,
        the word of a node does not count."""
        return names - {REWARD} if self.is_scored and row.reward is not None else names

    def _complete_rows(
        self, rows: Iterable[RowSummary], policy: PolicyName, names: frozenset[str]
    ) -> tuple[tuple[RowSummary, ...], DropReason | None]:
        """The rows that have all these columns, with the values filled in; the closing policy
        decides whether they are enough."""
        good: list[RowSummary] = []
        num_lost = 0
        for row in rows:
            found = [
                self._completed[row.row_id][name] for name in sorted(self._missing(row, names))
            ]
            if any(column.failed for column in found):
                num_lost += 1
            else:
                good.append(_with_columns(row, found))
        if self._closing.accepts(len(good), num_lost):
            return tuple(good), None
        return tuple(rows), DropReason.COLUMN_FAILED

    def _move(
        self,
        group_id: GroupId,
        waiting: _PendingGroup,
        policy: PolicyName,
        stage: Stage,
        now: float,
    ) -> None:
        waiting.stages[policy] = stage
        self._journal(CompletionRecord(group_id=group_id, policy=policy, state=stage, at=now))

    # --- restart ------------------------------------------------------------------------------

    def restore(
        self,
        groups: Mapping[GroupId, tuple[RowSummary, ...]],
        stages: Iterable[CompletionRecord],
        completed: Iterable[ColumnCompleted],
    ) -> None:
        """Restore closed groups that some policy waits for, and the columns of all rows that are
        not final yet."""
        for event in completed:
            self._completed.setdefault(event.row_id, {})[event.name] = event
        for group_id, rows in groups.items():
            self._groups[group_id] = _PendingGroup(rows)
            self._group_of.update((row.row_id, group_id) for row in rows)
        for record in stages:
            self._groups[record.group_id].stages[record.policy] = Stage(record.state)


def _with_columns(row: RowSummary, columns: Iterable[ColumnCompleted]) -> RowSummary:
    reward, digests, values = row.reward, dict(row.columns), dict(row.values)
    for column in columns:
        if column.name == REWARD:
            reward = column.value
        elif column.value is not None:
            values[column.name] = column.value
        else:
            digests[column.name] = column.digest
    return structs.replace(row, reward=reward, columns=digests, values=values)
