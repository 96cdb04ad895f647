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
from typing import ClassVar, Protocol

from penstock.dataflow.column_records import (
    BundleRecord,
    ColumnRecord,
    ItemRecord,
    ReaderRecord,
    RowLeaseRecord,
    SpaceRecord,
)
from penstock.types import (
    GroupId,
    NodeId,
    PolicyName,
    RowId,
    RowSummary,
)


class CommandJournal:
    """The journal of the running command: what must be durable before its answer leaves."""

    def __init__(self) -> None:
        self._records: list[Record | Deletion] = []

    def __call__(self, record: Record | Deletion) -> None:
        self._records.append(record)

    def take(self) -> list[Record | Deletion]:
        records, self._records = self._records, []
        return records


QUARANTINE_PREFIX = "quarantined/"
"""Before a node's name and one of its lives: the value is the session that gets no more work."""
FORGOTTEN_PREFIX = "gone/"
"""How the ledger begins the names of rows that nobody may be served any more."""
FORMAT = 1
"""Format of the ledger on disk; any other is refused."""


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
    TRUNCATED = "truncated"
    """Cut while it ran: its group had to close, or the slot's time was over."""


class FateState(StrEnum):
    ADMITTED = "admitted"
    SEALED = "sealed"
    DROPPED = "dropped"


GROUP_TRANSITIONS: Mapping[GroupState, frozenset[GroupState]] = MappingProxyType(
    {
        GroupState.OPEN: frozenset({GroupState.CLOSED, GroupState.DROPPED}),
        GroupState.CLOSED: frozenset(),
        GroupState.DROPPED: frozenset(),
    }
)
FATE_TRANSITIONS: Mapping[FateState, frozenset[FateState]] = MappingProxyType(
    {
        FateState.ADMITTED: frozenset({FateState.SEALED, FateState.DROPPED}),
        FateState.SEALED: frozenset({FateState.SEALED}),  # served again by a replay rule
        FateState.DROPPED: frozenset(),
    }
)


class Record(Protocol):
    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Not a record: what is final and wanted by nobody leaves its table, in the same commit."""

    kind: type[Record]
    where: str
    """SQL condition with named values."""
    values: Mapping[str, str | int | float]


class Journal(Protocol):
    """Where the core puts what must become durable before its answer leaves."""

    def __call__(self, record: Record | Deletion) -> None: ...


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
class IssuedRecord:
    """A group as home knows it, wherever its slots and rows are."""

    TABLE: ClassVar[str] = "issued"
    KEY: ClassVar[tuple[str, ...]] = ("group_id",)

    group_id: GroupId
    issue: int
    partition: int
    source: str
    ordinal: int
    task_key: str
    why: str
    """JSON: which rules chose it."""
    judged: bool
    """Every consumer has decided about it."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadSlotRecord:
    """A dead letter: a slot that was given up, with all its reasons."""

    TABLE: ClassVar[str] = "dead_slots"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "slot")

    group_id: GroupId
    slot: int
    reasons: str
    """JSON list, one per attempt."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRecord:
    """A closed group whose rows still miss columns that a policy requires."""

    TABLE: ClassVar[str] = "completions"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "policy")

    group_id: GroupId
    policy: PolicyName
    state: str
    """`judging`: columns of its rules are missing · `reported`: home has it to judge ·
    `training`: columns of its trainer are missing · `done`."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRecord:
    """Slots of one group that one request got together. Each is a lease of its own, which runs
    until a LeaseRecord says how it ended; one record for all, because most groups go whole."""

    TABLE: ClassVar[str] = "grants"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "slot", "epoch")

    group_id: GroupId
    slot: int
    """The first of them."""
    epoch: int
    num_slots: int
    attempt: int
    node_id: NodeId
    boot_id: str
    request_id: str
    granted_at: float

    @property
    def slots(self) -> range:
        return range(self.slot, self.slot + self.num_slots)

    def lease(self, slot: int, ended: str = "", at: float = 0.0, detail: str = "") -> LeaseRecord:
        """That of one of its slots, as it ended or as it runs."""
        return LeaseRecord(
            group_id=self.group_id,
            slot=slot,
            epoch=self.epoch,
            attempt=self.attempt,
            node_id=self.node_id,
            boot_id=self.boot_id,
            request_id=self.request_id,
            granted_at=self.granted_at,
            ended=ended,
            ended_at=at,
            detail=detail,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """A lease that ended; one that runs is a slot of a GrantRecord."""

    TABLE: ClassVar[str] = "leases"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "slot", "epoch")

    group_id: GroupId
    slot: int
    epoch: int
    attempt: int
    node_id: NodeId
    boot_id: str
    request_id: str
    granted_at: float
    ended: str
    """A LeaseEnd; empty only in memory, of a lease that runs."""
    ended_at: float
    detail: str = ""
    """Why it came to nothing, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRecord:
    """A delivered row: its summary, whose it is, and where its payload lies."""

    TABLE: ClassVar[str] = "rows"
    KEY: ClassVar[tuple[str, ...]] = ("row_id",)

    summary: RowSummary
    """Each of its fields is a column of the table; maps are JSON text."""
    group_id: GroupId
    slot: int
    epoch: int
    node_id: NodeId
    segment: int
    offset: int
    length: int
    delivered_at: float
    arrival: int = 0
    """Order of arrival at its partition; readers' cursors count in it."""
    space: str = "train"
    blob: str = ""
    """Digest of the claim-checked blob that holds the payload, empty when it lies in a segment."""

    @property
    def row_id(self) -> RowId:
        return self.summary.row_id


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
    arrival: int = 0
    """Order in which this consumer judged it."""
    uses: int = 0
    """How many batches it was in."""
    is_complete: bool = True
    """Every column its trainer needs is there; unset while a stage works on an admitted group."""
    rows: bytes = b""
    """msgpack list of RowSummary while the group may still be sealed, first time or again."""
    task_key: str = ""
    source: str = ""
    rewards: bytes = b""
    """One float64 per row, little-endian; with the versions all that a restart must read of a
    group that waits."""
    versions: str = "[]"
    """JSON: every [incarnation, number] that sampled its tokens of this policy."""


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
    num_replayed: int = 0
    """Groups in it that an earlier batch had already."""


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
    boot_id: str
    capacity: int
    policies: str
    tags: str
    left: bool
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedRecord:
    """The payload of this group is final for everybody and may be deleted."""

    TABLE: ClassVar[str] = "freed"
    KEY: ClassVar[tuple[str, ...]] = ("group_id",)

    group_id: GroupId
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleStateRecord:
    """One entry of a rule's memory; a rule keeps nothing elsewhere."""

    TABLE: ClassVar[str] = "rules"
    KEY: ClassVar[tuple[str, ...]] = ("rule", "key")

    rule: str
    """`POLICY/hook/position:name`."""
    key: str
    value: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """What a rule decided about something that left no other trace: a task that was skipped, an
    exception in a rule."""

    TABLE: ClassVar[str] = "decisions"
    KEY: ClassVar[tuple[str, ...]] = ("number",)

    number: int
    hook: str
    rule: str
    subject: str
    """A task key, group id or batch id."""
    verdict: str
    detail: str
    """JSON: the inputs, the random draw, or the error."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageRecord:
    """One numbered message between home and a partition, kept until its receiver has it."""

    TABLE: ClassVar[str] = "messages"
    KEY: ClassVar[tuple[str, ...]] = ("link", "number")

    link: str
    """`coordinator>p3` or `p3>coordinator`."""
    number: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord:
    """How far one direction of a link got."""

    TABLE: ClassVar[str] = "links"
    KEY: ClassVar[tuple[str, ...]] = ("link",)

    link: str
    number: int
    """Sent so far, or received so far: one side keeps each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord:
    """A partition as home knows it."""

    TABLE: ClassVar[str] = "partitions"
    KEY: ClassVar[tuple[str, ...]] = ("index",)

    index: int
    url: str
    epoch: int
    """Grows when it is declared lost or restored elsewhere; an older one is fenced."""
    state: str
    """`serving`, `draining`, `gone`, `lost`."""
    at: float
    boot_id: str = ""
    """Of the process that speaks for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    TABLE: ClassVar[str] = "sources"
    KEY: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    next_ordinal: int
    """Also how many tasks of it were issued or skipped."""
    skipped: int = 0
    """Tasks of it that rules found not worth rolling out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteRecord:
    """Tokens generated and never trained, by reason; a running total."""

    TABLE: ClassVar[str] = "waste"
    KEY: ClassVar[tuple[str, ...]] = ("reason",)

    reason: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaRecord:
    TABLE: ClassVar[str] = "meta"
    KEY: ClassVar[tuple[str, ...]] = ("key",)

    key: str
    value: str


RECORDS: tuple[type[Record], ...] = (
    GroupRecord,
    IssuedRecord,
    DeadSlotRecord,
    CompletionRecord,
    GrantRecord,
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
    WasteRecord,
    MetaRecord,
    FreedRecord,
    ColumnRecord,
    ReaderRecord,
    RowLeaseRecord,
    BundleRecord,
    ItemRecord,
    SpaceRecord,
    RuleStateRecord,
    DecisionRecord,
    MessageRecord,
    LinkRecord,
    PartitionRecord,
)


def quarantine_record(node_id: NodeId, boot_id: str) -> MetaRecord:
    return MetaRecord(key=f"{QUARANTINE_PREFIX}{node_id}/{boot_id}", value=boot_id)


def parse_quarantine(record: MetaRecord) -> tuple[NodeId, str]:
    """The node and boot id in quarantine."""
    return NodeId(record.key.removeprefix(QUARANTINE_PREFIX).partition("/")[0]), record.value


def gone_key(row_id: RowId) -> str:
    """Under which the ledger keeps that nobody may be served this row any more."""
    return f"{FORGOTTEN_PREFIX}{row_id}"


def row_id(group_id: GroupId, slot: int, epoch: int) -> RowId:
    return RowId(f"{group_id}.{slot}.{epoch}")
