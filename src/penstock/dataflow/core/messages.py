# SPDX-License-Identifier: Apache-2.0
"""What home and its partitions say to each other.

In one process a message is a call. Between processes each is numbered per link, repeated until it
is acknowledged, and applied once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from msgspec import Struct

from penstock.dataflow.records import (
    CommitRecord,
    GroupRecord,
    IncarnationRecord,
    VersionRecord,
)
from penstock.types import DropReason, GroupId, NodeId, PolicyName, RowId, RowSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedMessage:
    """One message on a link."""

    number: int
    body: bytes


# --- home to a partition ----------------------------------------------------------------------


class IssueGroup(Struct, frozen=True, kw_only=True, tag=True):
    """Run this group."""

    record: GroupRecord


class IncarnationStarted(Struct, frozen=True, kw_only=True, tag=True):
    """A trainer took over; versions beyond its fork count as the fork."""

    record: IncarnationRecord


class Committed(Struct, frozen=True, kw_only=True, tag=True):
    record: CommitRecord


class Published(Struct, frozen=True, kw_only=True, tag=True):
    record: VersionRecord


class HorizonMoved(Struct, frozen=True, kw_only=True, tag=True):
    """The next batch of this policy that is not sealed yet trains from this number."""

    policy: PolicyName
    number: int


class Admitted(Struct, frozen=True, kw_only=True, tag=True):
    """A policy wants this group: stages that work on admitted rows may begin."""

    group_id: GroupId
    policy: PolicyName


class DropGroup(Struct, frozen=True, kw_only=True, tag=True):
    """End this open group, whatever its members do."""

    group_id: GroupId
    reason: DropReason


class GroupsFreed(Struct, frozen=True, kw_only=True, tag=True):
    """Final for every consumer: the payload of these groups may be deleted."""

    group_ids: tuple[GroupId, ...]


class RowForgotten(Struct, frozen=True, kw_only=True, tag=True):
    """This row, or the running attempt that would become it, is of no use to anybody."""

    row_id: RowId


class Quarantined(Struct, frozen=True, kw_only=True, tag=True):
    """What this node samples is not what its version would: no more work for this life of it."""

    node_id: NodeId
    boot_id: str = ""
    """Which life; empty: the one that runs now."""


ToPartition = (
    IssueGroup
    | IncarnationStarted
    | Committed
    | Published
    | HorizonMoved
    | Admitted
    | DropGroup
    | GroupsFreed
    | RowForgotten
    | Quarantined
)

# --- a partition to home ----------------------------------------------------------------------


class GroupEnded(Struct, frozen=True, kw_only=True, tag=True):
    """A group can be judged by these policies. Every group comes to that, dropped ones too."""

    group_id: GroupId
    policies: tuple[PolicyName, ...]
    """Empty: all of them."""
    rows: tuple[RowSummary, ...]
    """Members with a result; also of a dropped group, whose tokens are waste."""
    dropped: DropReason | None = None


class ColumnsCompleted(Struct, frozen=True, kw_only=True, tag=True):
    """The columns that this policy's trainer needs are there, or will never be."""

    group_id: GroupId
    policy: PolicyName
    rows: tuple[RowSummary, ...]
    """Members that have them all."""
    dropped: DropReason | None = None


ToCoordinator = GroupEnded | ColumnsCompleted

SendToPartition = Callable[[int, ToPartition], None]
SendToCoordinator = Callable[[ToCoordinator], None]
SendGroupEnded = Callable[[GroupEnded], None]
