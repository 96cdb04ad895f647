# SPDX-License-Identifier: Apache-2.0
"""What the ledger keeps: one record per fact, each with its table and key, written whole.

The core emits these; a ledger upserts them in one transaction per command. Replaying a record
changes nothing, and the whole state of the service can be rebuilt from them. Small maps are JSON
text so that any reader can follow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Protocol, cast

import msgspec

from penstock.types import (
    DropReason,
    GroupId,
    NodeId,
    OutcomeKind,
    PolicyName,
    RowId,
    RowSummary,
)

FORMAT = 1
"""Of the ledger on disk. A newer one is refused by name; N reads N - 1."""


class GroupState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    """Every slot is terminal and the closing policy was content."""
    DROPPED = "dropped"


class LeaseEnd(StrEnum):
    DELIVERED = "delivered"
    FAILED = "failed"
    """A result arrived that says the attempt failed."""
    REJECTED = "rejected"
    """A result arrived that breaks the contract; costs an attempt like a failure."""
    RELEASED = "released"
    """Handed back; costs no attempt."""
    EXPIRED = "expired"
    """Its node fell silent, was replaced by a new life, or overran start-to-close."""
    CANCELLED = "cancelled"
    """Its group was dropped."""


class FateState(StrEnum):
    ADMITTED = "admitted"
    SEALED = "sealed"
    DROPPED = "dropped"


NEXT_GROUP: Mapping[GroupState, frozenset[GroupState]] = MappingProxyType(
    {
        GroupState.OPEN: frozenset({GroupState.CLOSED, GroupState.DROPPED}),
        GroupState.CLOSED: frozenset(),
        GroupState.DROPPED: frozenset(),
    }
)
NEXT_FATE: Mapping[FateState, frozenset[FateState]] = MappingProxyType(
    {
        FateState.ADMITTED: frozenset({FateState.SEALED, FateState.DROPPED}),
        FateState.SEALED: frozenset(),
        FateState.DROPPED: frozenset(),
    }
)


class Record(Protocol):
    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]


class Journal(Protocol):
    """Where the core puts what must become durable before its answer leaves."""

    def __call__(self, record: Record) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    TABLE: ClassVar[str] = "groups"
    KEY: ClassVar[tuple[str, ...]] = ("group_id",)

    group_id: GroupId
    partition: int
    issue: int
    """Position in the order of issue."""
    source: str
    ordinal: int
    task_key: str
    task: str
    """The Task as JSON."""
    num_slots: int
    due: str
    """JSON: by policy, the number of the version its batch was expected to train from."""
    state: GroupState
    reason: str
    issued_at: float
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    TABLE: ClassVar[str] = "leases"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "slot", "epoch")

    group_id: GroupId
    slot: int
    epoch: int
    attempt: int
    node_id: NodeId
    session: str
    request_id: str
    granted_at: float
    ended: str
    """A LeaseEnd, empty while the lease runs."""
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    TABLE: ClassVar[str] = "rows"
    KEY: ClassVar[tuple[str, ...]] = ("row_id",)

    row_id: RowId
    group_id: GroupId
    slot: int
    epoch: int
    node_id: NodeId
    digest: str
    segment: int
    offset: int
    length: int
    outcome: OutcomeKind
    reward: float | None
    sampled: str
    """JSON: trainable sampled tokens by policy."""
    versions: str
    """JSON: every [incarnation, number] that sampled them, by policy."""
    delivered_at: float

    @property
    def summary(self) -> RowSummary:
        assert self.reward is not None, "only scored rows are reported to home"
        versions = msgspec.json.decode(self.versions, type=dict[str, tuple[tuple[int, int], ...]])
        return RowSummary(
            row_id=self.row_id,
            digest=self.digest,
            reward=self.reward,
            outcome=OutcomeKind(self.outcome),
            sampled=cast(Mapping[PolicyName, int], msgspec.json.decode(self.sampled)),
            versions=cast(Mapping[PolicyName, tuple[tuple[int, int], ...]], versions),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FateRecord:
    """What became of a closed group for one consumer."""

    TABLE: ClassVar[str] = "fates"
    KEY: ClassVar[tuple[str, ...]] = ("consumer", "group_id")

    consumer: PolicyName
    group_id: GroupId
    state: FateState
    reason: str
    """A DropReason, or empty."""
    rule: str
    """Which rule decided."""
    seq: int
    """The batch it was sealed into, 0 for none."""
    tokens: int
    """Sampled tokens of this policy in the group."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRecord:
    TABLE: ClassVar[str] = "batches"
    KEY: ClassVar[tuple[str, ...]] = ("consumer", "seq")

    consumer: PolicyName
    seq: int
    incarnation: int
    trains_from: int
    num_groups: int
    num_rows: int
    digest: str
    manifest: bytes
    """msgpack Manifest, served byte for byte."""
    reward_mean: float
    staleness_mean: float
    staleness_max: int
    sealed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    TABLE: ClassVar[str] = "commits"
    KEY: ClassVar[tuple[str, ...]] = ("consumer", "seq", "incarnation")

    consumer: PolicyName
    seq: int
    incarnation: int
    number: int
    skipped: str
    """Reason, empty when the batch was trained."""
    stats: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationRecord:
    TABLE: ClassVar[str] = "incarnations"
    KEY: ClassVar[tuple[str, ...]] = ("policy", "incarnation")

    policy: PolicyName
    incarnation: int
    number: int
    seq: int
    request_id: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    TABLE: ClassVar[str] = "versions"
    KEY: ClassVar[tuple[str, ...]] = ("policy", "incarnation", "number")

    policy: PolicyName
    incarnation: int
    number: int
    manifest_digest: str
    weights_digest: str
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    TABLE: ClassVar[str] = "checkpoints"
    KEY: ClassVar[tuple[str, ...]] = ("policy",)

    policy: PolicyName
    incarnation: int
    retained: str
    """JSON list of [number, seq]."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    TABLE: ClassVar[str] = "nodes"
    KEY: ClassVar[tuple[str, ...]] = ("node_id",)

    node_id: NodeId
    session: str
    capacity: int
    policies: str
    tags: str
    left: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    TABLE: ClassVar[str] = "sources"
    KEY: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    next_ordinal: int
    """Also how many tasks of it were issued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRecord:
    TABLE: ClassVar[str] = "meta"
    KEY: ClassVar[tuple[str, ...]] = ("key",)

    key: str
    value: str


RECORDS: tuple[type[Record], ...] = (
    GroupRecord,
    LeaseRecord,
    RowRecord,
    FateRecord,
    BatchRecord,
    CommitRecord,
    IncarnationRecord,
    VersionRecord,
    CheckpointRecord,
    NodeRecord,
    SourceRecord,
    MetaRecord,
)


def row_id(group_id: GroupId, slot: int, epoch: int) -> RowId:
    return RowId(f"{group_id}.{slot}.{epoch}")


# --- what home and a partition say to each other ----------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Issue:
    """Home to partition: run this group."""

    record: GroupRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Partition to home: a group ended. Every group does, dropped ones included."""

    group_id: GroupId
    task_key: str
    rows: tuple[RowSummary, ...]
    """Scored members, empty when dropped."""
    dropped: DropReason | None = None
