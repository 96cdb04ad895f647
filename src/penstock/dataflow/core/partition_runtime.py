# SPDX-License-Identifier: Apache-2.0
"""A partition with everything it owns: leases and groups, columns and readers. Applies the
coordinator's messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.dataflow.core.completion import ColumnCompleted, Completion
from penstock.dataflow.core.messages import (
    Admitted,
    Committed,
    DropGroup,
    GroupsFreed,
    HorizonMoved,
    IncarnationStarted,
    IssueGroup,
    Published,
    Quarantined,
    RowForgotten,
    ToPartition,
    TrainingEnded,
)
from penstock.dataflow.core.names import TRAIN
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.core.version_gate import VersionGate
from penstock.dataflow.records import FreedRecord, Journal, MetaRecord, gone_key
from penstock.types import DropReason, RowId, subject_of_node


class RowReaders(Protocol):
    """The partition's rows, as offered to readers."""

    def admitted(self, row_ids: Sequence[RowId], now: float) -> None: ...
    def forget(self, space: str, row_ids: Iterable[RowId]) -> None: ...
    def pop_completed(self) -> list[ColumnCompleted]: ...


class PartitionRuntime:
    def __init__(
        self,
        partition: Partition,
        completion: Completion,
        gate: VersionGate,
        journal: Journal,
        row_window: RowReaders | None = None,
        *,
        is_colocated: bool,
    ) -> None:
        """row_window: the rows offered to readers; None in simulated partitions."""
        self.partition = partition
        self.completion = completion
        self.gate = gate
        self._row_window = row_window
        self._journal = journal
        self._shares_home = is_colocated
        """The coordinator is in this process and shares the lineages and the ledger."""

    def apply(self, message: ToPartition, now: float) -> None:
        """Apply a message from the coordinator."""
        match message:
            case IssueGroup():
                self.partition.issue(message.record, now)
            case HorizonMoved():
                self.gate.horizon[message.policy] = message.number
                self.partition.policies_advanced(now)
            case Admitted():
                self.completion.admitted(message.group_id, message.policy, now)
                if self._row_window is not None:
                    self._row_window.admitted(self.completion.rows_of(message.group_id), now)
            case DropGroup():
                self.partition.drop(message.group_id, message.reason, now)
            case GroupsFreed():
                self._freed(message, now)
            case RowForgotten():
                self._forget(message.row_id, now)
            case TrainingEnded():
                self.partition.waiting.has_training_ended = message.has_ended
            case Quarantined():
                self.partition.quarantine(subject_of_node(message.node_id), now)
            case IncarnationStarted() | Committed() | Published():
                self._moved(message, now)

    def apply_completed_columns(self, now: float) -> None:
        """Pass the columns that stages have written to the groups that wait for them. Call it
        after the reports of groups that ended, which are open no more."""
        if self._row_window is not None:
            events = self._row_window.pop_completed()
            self.completion.completed(events, self.partition.groups, now)

    def _moved(self, message: IncarnationStarted | Committed | Published, now: float) -> None:
        """Apply a change of a policy's lineage, unless a coordinator in this process already
        has."""
        if self._shares_home:
            return
        self._journal(message.record)
        match message:
            case IncarnationStarted(record=record):
                self.gate.lineages[record.policy].apply_incarnation(record)
            case Committed(record=record):
                self.gate.lineages[record.consumer].apply_commit(record)
            case Published(record=record):
                self.gate.lineages[record.policy].apply_version(record)
        self.partition.policies_advanced(now)

    def _freed(self, message: GroupsFreed, now: float) -> None:
        self.completion.forget(message.group_ids)
        if not self._shares_home:
            for group_id in message.group_ids:
                self._journal(FreedRecord(group_id=group_id, at=now))

    def _forget(self, row_id: RowId, now: float) -> None:
        if not self._shares_home:
            self._journal(MetaRecord(key=gone_key(row_id), value=DropReason.FORGOTTEN))
        if self._row_window is not None:
            self._row_window.forget(TRAIN, [row_id])
        self.partition.forget(row_id, now)
