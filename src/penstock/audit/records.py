# SPDX-License-Identifier: Apache-2.0
"""The auditor's own idea of the ledger's tables, of manifests and of messages.

Judges nothing: a value of the wrong type is the only thing refused. The records are msgspec
Structs, not dataclasses, because those check a table row's types while they take it.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

T = TypeVar("T")
VersionId = tuple[int, int]
"""A version: (incarnation, number)."""
SCORED = ("completed", "truncated")
"""Outcomes of rows that count; any other row is a failure and has no reward."""


class TableRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of one table; the fields are the columns read, in this order."""


# --- what partitions keep -------------------------------------------------------------------------


class Group(TableRecord, frozen=True, gc=False):
    group_id: str
    partition: int
    issue: int
    source: str
    ordinal: int
    task_key: str
    num_slots: int
    state: str


class Grant(TableRecord, frozen=True, gc=False):
    """Leases of neighbouring slots that began together."""

    group_id: str
    slot: int
    epoch: int
    num_slots: int
    attempt: int
    node_id: str


class Lease(TableRecord, frozen=True, gc=False):
    group_id: str
    slot: int
    epoch: int
    attempt: int
    node_id: str
    ended: str


class Row(TableRecord, frozen=True, gc=False):
    row_id: str
    group_id: str
    slot: int
    epoch: int
    node_id: str
    digest: str
    segment: int
    offset: int
    length: int
    outcome: str
    reward: float | None
    """As delivered; a stage may write one later, as a column."""
    sampled: str
    versions: str
    blob: str
    """Digest of the blob that holds the payload, when it lies in no segment."""
    roles: str
    """Of policies that acted in named roles, their tokens by role; empty for none."""
    compute_cost: str
    """By policy, what its trainer computes; empty for none."""


class Column(TableRecord, frozen=True, gc=False):
    """A write-once field that a stage added to a row."""

    space: str
    row_id: str
    name: str
    failed: str
    """Kind of failure, empty for a value."""
    value: float | None
    digest: str


class Completion(TableRecord, frozen=True, gc=False):
    """A closed group on its way to a policy that needs columns of its rows."""

    group_id: str
    policy: str
    state: str


class Freed(TableRecord, frozen=True, gc=False):
    """A group whose payload may be gone."""

    group_id: str


# --- what home keeps ------------------------------------------------------------------------------


class Issued(TableRecord, frozen=True, gc=False):
    """A group as home knows it, wherever its slots and rows are."""

    group_id: str
    partition: int
    issue: int
    source: str
    ordinal: int
    task_key: str
    judged: int
    """1 when every consumer has decided about it."""


class Fate(TableRecord, frozen=True, gc=False):
    consumer: str
    group_id: str
    state: str
    reason: str
    seq: int


class Batch(TableRecord, frozen=True, gc=False):
    consumer: str
    seq: int
    incarnation: int
    trains_from: int
    num_groups: int
    num_rows: int
    digest: str
    manifest: bytes
    reward_mean: float
    staleness_mean: float
    staleness_max: int
    sealed_at: float

    @property
    def name(self) -> str:
        return f"{self.consumer}.{self.seq}"


class Source(TableRecord, frozen=True, gc=False):
    name: str
    next_ordinal: int
    skipped: int
    """Tasks before that ordinal which rules found not worth a group."""


class Checkpoints(TableRecord, frozen=True, gc=False):
    """What a trainer can still go back to."""

    policy: str
    retained: str
    """JSON list of [number, seq]."""


class Partition(TableRecord, frozen=True, gc=False):
    """A further data partition, with a ledger of its own."""

    index: int
    state: str
    """`serving`, `draining`, `gone`, `lost`."""


# --- what both keep -------------------------------------------------------------------------------


class Commit(TableRecord, frozen=True, gc=False):
    consumer: str
    seq: int
    incarnation: int
    number: int
    skipped: str


class Fork(TableRecord, frozen=True, gc=False):
    """One incarnation: the life of a trainer, and where it starts from."""

    policy: str
    incarnation: int
    number: int
    seq: int


class Version(TableRecord, frozen=True, gc=False):
    policy: str
    incarnation: int
    number: int
    manifest_digest: str
    weights_digest: str
    at: float

    @property
    def name(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.number}"


class Progress(TableRecord, frozen=True, gc=False):
    """How far one direction of a link got: acknowledged at its sender, received at its end."""

    link: str
    number: int


class Message(TableRecord, frozen=True, gc=False):
    """Kept by its sender until the other side has it."""

    link: str
    number: int
    body: bytes


# --- what is packed into them ---------------------------------------------------------------------


class ManifestRow(msgspec.Struct, frozen=True, gc=False):
    """A row as a manifest names it."""

    row_id: str
    digest: str
    reward: float
    outcome: str
    sampled: dict[str, int]
    versions: dict[str, list[VersionId]]
    columns: dict[str, str] = {}
    """Digests of columns of bytes."""
    values: dict[str, float] = {}
    """Columns that are one number."""
    roles: dict[str, dict[str, int]] = {}
    """Of policies that acted in named roles, their tokens by role."""
    compute_cost: dict[str, tuple[int, int]] = {}
    """By policy, what its trainer computes: tokens and squared lengths of the samples."""


class ManifestGroup(msgspec.Struct, frozen=True):
    group_id: str
    task_key: str
    rows: tuple[ManifestRow, ...]


class Manifest(msgspec.Struct, frozen=True):
    consumer: str
    seq: int
    trains_from: int
    groups: tuple[ManifestGroup, ...]
    visible_roles: tuple[tuple[str, str], ...] | None = None
    """The (policy, role) pairs that its consumer trains; None: its own policy's."""


class _GroupRef(msgspec.Struct, frozen=True):
    group_id: str = ""


class MessageBody(msgspec.Struct, frozen=True):
    """Of a message between home and a partition, only which group it is about."""

    type: str
    group_id: str = ""
    policies: tuple[str, ...] = ()
    """Whose verdict a Report asks for; empty for all."""
    record: _GroupRef = _GroupRef()


def decode_map(text: str, kind: type[T], known: dict[str, T]) -> T | None:
    """A JSON column; the few distinct texts of a run are decoded once."""
    if text not in known:
        try:
            known[text] = msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError:
            return None
    return known[text]


def decode_manifest(batch: Batch) -> Manifest | None:
    try:
        return msgspec.msgpack.decode(batch.manifest, type=Manifest)
    except msgspec.MsgspecError:
        return None


def decode_body(message: Message) -> MessageBody | None:
    try:
        return msgspec.msgpack.decode(message.body, type=MessageBody)
    except msgspec.MsgspecError:
        return None
