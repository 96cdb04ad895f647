# SPDX-License-Identifier: Apache-2.0
"""Ledger records: one per fact, each with its table and key, always written completely.

The core emits these; a ledger upserts them in one transaction per command. Writing a record again
changes nothing, and the complete state of the service can be rebuilt from them. Small maps are JSON
text so that any reader can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import ClassVar, Protocol

import msgspec

from penstock.dataflow.column_records import (
    BundleRecord,
    ColumnRecord,
    ItemRecord,
    ReaderRecord,
    RowLeaseRecord,
    SpaceRecord,
)
from penstock.types import (
    UNTRUSTED_TAG,
    GroupId,
    NodeId,
    OutcomeKind,
    PolicyName,
    RowId,
    RowSummary,
    subject_of_node,
)


class CommandJournal:
    """Collects the records of the current command, which must be durable before its response is
    sent."""

    def __init__(self) -> None:
        self._records: list[Record | Deletion] = []

    def __call__(self, record: Record | Deletion) -> None:
        self._records.append(record)

    def take(self) -> list[Record | Deletion]:
        records, self._records = self._records, []
        return records


_ROWS = msgspec.msgpack.Decoder(tuple[RowSummary, ...])
_UNTRUSTED = f'"{UNTRUSTED_TAG}"'
QUARANTINE_PREFIX = "quarantined/"
"""Key prefix, followed by the subject whose nodes get no more work."""
FORGOTTEN_PREFIX = "gone/"
"""Key prefix for rows that no reader may receive anymore."""
FORMAT = 4
"""Format of the ledger on disk; a ledger with any other format is refused."""


class GroupState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    """Every slot is terminal and the closing policy accepted the group."""
    DROPPED = "dropped"


class LeaseEnd(StrEnum):
    DELIVERED = "delivered"
    FAILED = "failed"
    """The delivered result reports a failed attempt."""
    REJECTED = "rejected"
    """The delivered result breaks the contract; costs an attempt, like a failure."""
    RELEASED = "released"
    """Handed back; costs no attempt."""
    EXPIRED = "expired"
    """Its node fell silent, was replaced by a new process, or overran start-to-close."""
    CANCELLED = "cancelled"
    """Its group was dropped."""
    TRUNCATED = "truncated"
    """Cut while running: its group had to close, or the slot ran out of time."""


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
        FateState.SEALED: frozenset({FateState.SEALED}),  # replayed
        FateState.DROPPED: frozenset(),
    }
)


class Record(Protocol):
    TABLE: ClassVar[str]
    KEY: ClassVar[tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """Not a record: removes final records that are no longer needed, in the same commit."""

    kind: type[Record]
    where: str
    """SQL condition with named parameters."""
    values: Mapping[str, str | int | float]


class Journal(Protocol):
    """Where the core writes records that must be durable before its response is sent."""

    def __call__(self, record: Record | Deletion) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecord:
    """An issued group. The coordinator writes one for every group; its partition writes the same
    record again when the group arrives, and once more when it ends."""

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
    why: str
    """JSON: which rules chose it."""
    state: GroupState
    """In the ledger of its partition; any other ledger keeps it open."""
    reason: str
    issued_at: float
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadSlotRecord:
    """A dead letter: a slot that was given up, with the reason of every attempt."""

    TABLE: ClassVar[str] = "dead_slots"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "slot")

    group_id: GroupId
    slot: int
    reasons: str
    """JSON list, one per attempt."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRecord:
    """A closed group whose rows still lack columns that a policy requires."""

    TABLE: ClassVar[str] = "completions"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "policy")

    group_id: GroupId
    policy: PolicyName
    state: str
    """`judging`: columns for its rules are missing · `reported`: sent to the coordinator for
    judging · `training`: columns for its trainer are missing · `done`."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantRecord:
    """Slots of one group that one request got together. Each slot is a separate lease, which runs
    until its result is stored or a LeaseRecord says how it ended; they share one record because
    most groups are granted in one piece."""

    TABLE: ClassVar[str] = "grants"
    KEY: ClassVar[tuple[str, ...]] = ("group_id", "slot", "epoch")

    group_id: GroupId
    slot: int
    """The first slot."""
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
        """The lease of one of its slots, ended or running."""
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
    """A lease that ended without a result. A running lease is a slot of a GrantRecord; one that
    ended well is that and the row of its result."""

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
    """A LeaseEnd. Only in memory: empty for a running lease, `delivered` for one with a result."""
    ended_at: float
    detail: str = ""
    """Why it failed, for people."""


class RowRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A delivered row: its summary, its group and node, and the location of its payload. A Struct,
    like FateRecord: making frozen dataclasses would be a tenth of a delivery."""

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
    """Order of arrival at its partition; readers' cursors refer to it."""
    space: str = "train"
    blob: str = ""
    """Digest of the claim-checked blob that holds the payload; empty if it is in a segment."""

    @property
    def row_id(self) -> RowId:
        return self.summary.row_id

    @property
    def is_result(self) -> bool:
        """Whether it is the result of its slot; its lease then ended as delivered."""
        return self.summary.outcome in (OutcomeKind.COMPLETED, OutcomeKind.TRUNCATED)


class FateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An ended group as one consumer holds it, from its verdict until no batch needs it. Rules read
    it as a JudgedGroup or a Candidate."""

    TABLE: ClassVar[str] = "fates"
    KEY: ClassVar[tuple[str, ...]] = ("consumer", "group_id")

    consumer: PolicyName
    group_id: GroupId
    task_key: str
    source: str
    state: FateState = FateState.ADMITTED
    reason: str = ""
    """A DropReason, or empty."""
    rule: str = ""
    """The rule that decided."""
    at: float = 0.0
    arrival: int = 0
    """Order in which this consumer judged it."""
    number: int = 0
    """The policy's committed version when rules judged the group."""
    oldest: int = 0
    """Oldest version among its tokens, as of the last time rules chose from it."""
    tokens: int = 0
    """Sampled tokens of this policy in the group."""
    rewards: tuple[float, ...] = ()
    """One per row."""
    versions: tuple[tuple[int, int], ...] = ()
    """Every (incarnation, number) that sampled tokens of this policy in the group; empty if its
    trainer only sees tokens that other policies sampled."""
    packed_rows: bytes = b""
    """msgpack list of RowSummary, while the group may still be sealed or replayed. In memory empty
    after a restart: the ledger has the rows."""
    seq: int = 0
    """The newest batch it was sealed into; 0 for none."""
    uses: int = 0
    """How many batches have contained it."""
    is_complete: bool = True
    """Every column its trainer needs is present; False while a stage works on an admitted group."""

    @property
    def policy(self) -> PolicyName:
        return self.consumer

    @property
    def num_rows(self) -> int:
        return len(self.rewards)

    @property
    def rows(self) -> tuple[RowSummary, ...]:
        return _ROWS.decode(self.packed_rows) if self.packed_rows else ()


class EvaluationState(StrEnum):
    OPEN = "open"
    DONE = "done"
    ABANDONED = "abandoned"
    """The run was resumed with other suites before all questions were answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """The evaluation of one version."""

    TABLE: ClassVar[str] = "evaluations"
    KEY: ClassVar[tuple[str, ...]] = ("policy", "incarnation", "number")

    policy: PolicyName
    incarnation: int
    number: int
    pins: Mapping[PolicyName, tuple[int, int]]
    """Versions that answer, as (incarnation, number), of every policy that the workflow calls."""
    suites: Mapping[str, str]
    """Digest by suite, in their order."""
    num_groups: int
    """Questions, over all suites."""
    samples: int
    temperature: float
    state: EvaluationState
    scores: Mapping[str, float]
    """Mean score by suite, failed attempts as 0; empty until it is done."""
    started_at: float
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedRecord:
    """One question of an evaluation, with all its answers."""

    TABLE: ClassVar[str] = "evaluated"
    KEY: ClassVar[tuple[str, ...]] = ("group_id",)

    group_id: GroupId
    policy: PolicyName
    incarnation: int
    number: int
    suite: str
    ordinal: int
    """Position of the question in its suite."""
    question: str
    seed: int
    """Seed of the task; the seeds of its slots follow from it."""
    num_slots: int
    packed_rows: bytes
    """msgpack list of RowSummary of the scored answers."""
    failures: Mapping[str, str]
    """Why a slot has no answer, by slot."""
    at: float

    @property
    def rows(self) -> tuple[RowSummary, ...]:
        return _ROWS.decode(self.packed_rows) if self.packed_rows else ()


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
    """Groups that were already in an earlier batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalmentRecord:
    """A part of a streamed batch: groups that are final, while later ones still run. With the last
    instalment its BatchRecord is written, which has the groups of all in their order."""

    TABLE: ClassVar[str] = "instalments"
    KEY: ClassVar[tuple[str, ...]] = ("consumer", "seq", "instalment")

    consumer: PolicyName
    seq: int
    """The batch."""
    instalment: int
    """1, 2, 3, … in each batch."""
    incarnation: int
    trains_from: int
    """The same in all instalments of a batch."""
    num_groups: int
    """0 only in a last instalment: no group was left to wait for."""
    num_rows: int
    digest: str
    manifest: bytes
    """msgpack Manifest of these groups, served byte for byte."""
    staleness_sum: int
    staleness_max: int
    sealed_at: float
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    TABLE: ClassVar[str] = "commits"
    KEY: ClassVar[tuple[str, ...]] = ("consumer", "seq", "incarnation")

    consumer: PolicyName
    seq: int
    incarnation: int
    number: int
    skipped: str
    """Reason; empty if the batch was trained."""
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

    @property
    def is_untrusted(self) -> bool:
        """It registered with an untrusted credential."""
        return _UNTRUSTED in self.tags


@dataclass(frozen=True, slots=True, kw_only=True)
class FreedRecord:
    """The payload of this group is final for every consumer and may be deleted."""

    TABLE: ClassVar[str] = "freed"
    KEY: ClassVar[tuple[str, ...]] = ("group_id",)

    group_id: GroupId
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleStateRecord:
    """One entry of a rule's state; a rule keeps no state elsewhere."""

    TABLE: ClassVar[str] = "rules"
    KEY: ClassVar[tuple[str, ...]] = ("rule", "key")

    rule: str
    """`POLICY/hook/position:name`."""
    key: str
    value: str
    """JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """A rule's decision that leaves no other record: a skipped task, or an exception in a rule."""

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
    """One numbered message between the coordinator and a partition, kept until it is
    acknowledged."""

    TABLE: ClassVar[str] = "messages"
    KEY: ClassVar[tuple[str, ...]] = ("link", "number")

    link: str
    """`coordinator>p3` or `p3>coordinator`."""
    number: int
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRecord:
    """Progress of one direction of a link."""

    TABLE: ClassVar[str] = "links"
    KEY: ClassVar[tuple[str, ...]] = ("link",)

    link: str
    number: int
    """The last number sent, on the sender's side, or received, on the receiver's side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRecord:
    """A partition as the coordinator sees it."""

    TABLE: ClassVar[str] = "partitions"
    KEY: ClassVar[tuple[str, ...]] = ("index",)

    index: int
    url: str
    epoch: int
    """Incremented when the partition is declared lost or restored elsewhere; older epochs are
    fenced."""
    state: str
    """`serving`, `draining`, `gone`, `lost`."""
    at: float
    boot_id: str = ""
    """Boot id of the process that runs it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    TABLE: ClassVar[str] = "sources"
    KEY: ClassVar[tuple[str, ...]] = ("name",)

    name: str
    next_ordinal: int
    """Also the number of its tasks that were issued or skipped."""
    skipped: int = 0
    """Its tasks that rules found not worth rolling out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WasteRecord:
    """Tokens generated but never trained, by reason; a running total."""

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
    DeadSlotRecord,
    CompletionRecord,
    GrantRecord,
    LeaseRecord,
    RowRecord,
    FateRecord,
    EvaluationRecord,
    EvaluatedRecord,
    BatchRecord,
    InstalmentRecord,
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


def quarantine_record(subject: str) -> MetaRecord:
    return MetaRecord(key=f"{QUARANTINE_PREFIX}{subject}", value=subject)


def parse_quarantine(record: MetaRecord) -> str:
    """The subject in quarantine; a record of an older penstock names a node and its boot_id."""
    node_id = record.key.removeprefix(QUARANTINE_PREFIX).partition("/")[0]
    return subject_of_node(NodeId(node_id))


def gone_key(row_id: RowId) -> str:
    """Key under which the ledger marks a row as forgotten."""
    return f"{FORGOTTEN_PREFIX}{row_id}"


def row_id(group_id: GroupId, slot: int, epoch: int) -> RowId:
    return RowId(f"{group_id}.{slot}.{epoch}")
