# SPDX-License-Identifier: Apache-2.0
"""The auditor's own definition of the ledger's tables, of manifests and of messages.

Checks nothing but types. The records are msgspec Structs, not dataclasses, because msgspec checks
the types of a table row while it converts it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
VersionId = tuple[int, int]
"""A version: (incarnation, number)."""
SCORED = ("completed", "truncated")
"""Outcomes of rows that count; any other row is a failure and has no reward."""


class TableRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A row of one table; the fields are the columns read, in this order."""


# --- kept by partitions ---------------------------------------------------------------------------


class Group(TableRecord, frozen=True, gc=False):
    group_id: str
    partition: int
    issue: int
    source: str
    ordinal: int
    task_key: str
    num_slots: int
    state: str
    due: str

    @property
    def is_evaluation(self) -> bool:
        """A question of an evaluation: `pPARTITION-eINCARNATION-NUMBER-INDEX`."""
        return "-e" in self.group_id

    @property
    def judges(self) -> set[str]:
        """Policies that judge it: those that it was issued for."""
        return set(decode_json(self.due, dict[str, int]) or {})


class EvaluationRow(TableRecord, frozen=True, gc=False):
    """One evaluation of one version."""

    policy: str
    incarnation: int
    number: int
    pins: str
    """JSON: by policy, incarnation and number of the version that answers."""
    num_groups: int
    samples: int
    state: str

    @property
    def name(self) -> str:
        return f"{self.policy}@{self.incarnation}.{self.number}"


class EvaluatedGroup(TableRecord, frozen=True, gc=False):
    """One question of an evaluation that has all its answers."""

    group_id: str
    policy: str
    incarnation: int
    number: int
    suite: str
    ordinal: int
    num_slots: int
    failures: str
    """JSON: by slot, why it has no answer."""


class Grant(TableRecord, frozen=True, gc=False):
    """Leases of adjacent slots that started together."""

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
    """Digest of the blob that holds the payload; empty if it is in a segment."""
    roles: str
    """Tokens by role, for policies that acted in named roles; empty for none."""
    compute_cost: str
    """Cost of the trainer's computation by policy; empty for none."""
    values: str
    """Rewards of roles and turns as delivered; empty for none."""


class Column(TableRecord, frozen=True, gc=False):
    """A write-once field that a stage added to a row."""

    space: str
    row_id: str
    name: str
    failed: str
    """Kind of failure; empty for a value."""
    value: float | None
    digest: str


class Completion(TableRecord, frozen=True, gc=False):
    """A closed group that waits for columns a policy needs."""

    group_id: str
    policy: str
    state: str


class Freed(TableRecord, frozen=True, gc=False):
    """A group whose payload may have been deleted."""

    group_id: str


# --- kept by the coordinator ----------------------------------------------------------------------


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


class Instalment(TableRecord, frozen=True, gc=False):
    """A part of a streamed batch, sealed before the rest."""

    consumer: str
    seq: int
    instalment: int
    incarnation: int
    trains_from: int
    num_groups: int
    num_rows: int
    digest: str
    manifest: bytes
    sealed_at: float
    is_last: int

    @property
    def batch_name(self) -> str:
        return f"{self.consumer}.{self.seq}"

    @property
    def name(self) -> str:
        return f"{self.batch_name} instalment {self.instalment}"


class Source(TableRecord, frozen=True, gc=False):
    name: str
    next_ordinal: int
    skipped: int
    """Tasks before that ordinal that rules found not worth rolling out."""


class Checkpoints(TableRecord, frozen=True, gc=False):
    """The checkpoints a trainer can still return to."""

    policy: str
    retained: str
    """JSON list of [number, seq]."""


class Partition(TableRecord, frozen=True, gc=False):
    """An additional data partition, with a separate ledger."""

    index: int
    state: str
    """`serving`, `draining`, `gone`, `lost`."""


# --- kept by both ---------------------------------------------------------------------------------


class Commit(TableRecord, frozen=True, gc=False):
    consumer: str
    seq: int
    incarnation: int
    number: int
    skipped: str


class Fork(TableRecord, frozen=True, gc=False):
    """One incarnation: a trainer process and its starting point."""

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
    """Progress of one direction of a link: acknowledged at the sender, received at the other
    end."""

    link: str
    number: int


class Message(TableRecord, frozen=True, gc=False):
    """Kept by its sender until the other side acknowledges it."""

    link: str
    number: int
    body: bytes


# --- encoded inside the records -------------------------------------------------------------------


class ManifestRow(msgspec.Struct, frozen=True, gc=False):
    """A row as listed in a manifest."""

    row_id: str
    digest: str
    reward: float
    outcome: str
    sampled: dict[str, int]
    versions: dict[str, list[VersionId]]
    columns: dict[str, str] = {}
    """Digests of columns of bytes."""
    values: dict[str, float] = {}
    """Columns that are a single number."""
    roles: dict[str, dict[str, int]] = {}
    """Tokens by role, for policies that acted in named roles."""
    compute_cost: dict[str, tuple[int, int]] = {}
    """Cost of the trainer's computation by policy: tokens and squared lengths of the samples."""


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
    """The (policy, role) pairs that its consumer trains; None: only its own policy."""


class _GroupRef(msgspec.Struct, frozen=True):
    group_id: str = ""


class MessageBody(msgspec.Struct, frozen=True):
    """A message between the coordinator and a partition, reduced to the group it is about."""

    type: str
    group_id: str = ""
    policies: tuple[str, ...] = ()
    """Policies that a GroupEnded message asks to judge; empty for all."""
    record: _GroupRef = _GroupRef()


def decode_json(text: str, kind: type[T]) -> T | None:
    """Decode a JSON column; None if it is damaged."""
    return _decode_json(text, kind)


@lru_cache(maxsize=4096)  # most columns of a run have few distinct texts
def _decode_json(text: str, kind: Any) -> Any:
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(text, type=kind)
    return None


def decode_manifest(batch: Batch | Instalment) -> Manifest | None:
    with suppress(msgspec.MsgspecError):
        return msgspec.msgpack.decode(batch.manifest, type=Manifest)
    return None


def decode_body(message: Message) -> MessageBody | None:
    with suppress(msgspec.MsgspecError):
        return msgspec.msgpack.decode(message.body, type=MessageBody)
    return None
