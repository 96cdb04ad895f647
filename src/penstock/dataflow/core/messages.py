# SPDX-License-Identifier: Apache-2.0
"""Messages between the coordinator and its partitions.

In one process a message is a call. Between processes each message is numbered per link, resent
until it is acknowledged, and applied once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct, field

from penstock.bounds import Count, Label, Text
from penstock.dataflow.records import (
    CommitRecord,
    GroupRecord,
    IncarnationRecord,
    VersionRecord,
)
from penstock.types import (
    DropReason,
    GroupId,
    NodeId,
    PolicyName,
    RowId,
    RowSummary,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedMessage:
    """One message on a link."""

    number: Count
    body: Annotated[bytes, Meta(max_length=64 << 20)]


# --- coordinator to partition -----------------------------------------------------------------


class IssueGroup(Struct, frozen=True, kw_only=True, tag=True):
    """Run this group."""

    record: GroupRecord


class IncarnationStarted(Struct, frozen=True, kw_only=True, tag=True):
    """A new trainer process took over; versions beyond its fork count as the fork."""

    record: IncarnationRecord


class Committed(Struct, frozen=True, kw_only=True, tag=True):
    record: CommitRecord


class Published(Struct, frozen=True, kw_only=True, tag=True):
    record: VersionRecord


class HorizonMoved(Struct, frozen=True, kw_only=True, tag=True):
    """The policy's next unsealed batch trains from this number."""

    policy: PolicyName
    number: int


class Admitted(Struct, frozen=True, kw_only=True, tag=True):
    """A policy admitted this group: stages that work on admitted rows may start."""

    group_id: GroupId
    policy: PolicyName


class DropGroup(Struct, frozen=True, kw_only=True, tag=True):
    """End this open group, whatever the state of its members."""

    group_id: GroupId
    reason: DropReason


class GroupsFreed(Struct, frozen=True, kw_only=True, tag=True):
    """These groups are final for every consumer: their payload may be deleted."""

    group_ids: tuple[GroupId, ...]


class RowForgotten(Struct, frozen=True, kw_only=True, tag=True):
    """No consumer may use this row, or the running attempt that would produce it."""

    row_id: RowId


class TrainingEnded(Struct, frozen=True, kw_only=True, tag=True):
    """No policy will be trained anymore, so evaluations may take all slots; or one is again."""

    has_ended: bool


class Quarantined(Struct, frozen=True, kw_only=True, tag=True):
    """This node's samples do not match its version's outputs: no more work for its subject."""

    node_id: NodeId
    """Any node of the subject."""


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
    | TrainingEnded
    | Quarantined
)

# --- partition to coordinator -----------------------------------------------------------------


class GroupEnded(Struct, frozen=True, kw_only=True, tag=True):
    """A group can be judged by these policies. Sent for every group, including dropped ones."""

    group_id: GroupId
    policies: Annotated[tuple[PolicyName, ...], Meta(max_length=1024)]
    """Empty: all of them."""
    rows: Annotated[tuple[RowSummary, ...], Meta(max_length=100_000)]
    """Members with a result; for a dropped group too, since their tokens count as waste."""
    dropped: DropReason | None = None
    num_failed: Count = 0
    """Failed attempts in the group."""
    cause: Text = ""
    """Why the last of its slots ran out of attempts, if one did."""
    is_excused: bool = False
    """It failed by the word of untrusted nodes, which says nothing about the run."""
    failures: Annotated[Mapping[Label, Text], Meta(max_length=100_000)] = field(
        default_factory=dict[str, str]
    )
    """Of an evaluation: why a slot has no result, by slot."""


class ColumnsCompleted(Struct, frozen=True, kw_only=True, tag=True):
    """The columns that this policy's trainer needs are present, or have failed for good."""

    group_id: GroupId
    policy: PolicyName
    rows: Annotated[tuple[RowSummary, ...], Meta(max_length=100_000)]
    """Members that have all of them."""
    dropped: DropReason | None = None


ToCoordinator = GroupEnded | ColumnsCompleted

SendToPartition = Callable[[int, ToPartition], None]
SendToCoordinator = Callable[[ToCoordinator], None]
SendGroupEnded = Callable[[GroupEnded], None]
