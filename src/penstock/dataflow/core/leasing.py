# SPDX-License-Identifier: Apache-2.0
"""Types for leasing that the core and the wire share: nodes, grants and delivery results.

Defines types only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from penstock.bounds import SAFE, Count, Id, Label, Seconds
from penstock.dataflow.records import row_id
from penstock.types import (
    GroupId,
    NodeId,
    PolicyName,
    RowId,
)

MAX_CAPACITY = 100_000


class NodeState(StrEnum):
    STARTING = "starting"
    """Joined, but no engine is live yet; gets no leases."""
    LIVE = "live"
    PAUSED = "paused"
    """Keeps its leases and generates nothing, because its resource trains; gets no new ones."""
    DRAINING = "draining"
    """Finishes its current leases; gets no new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveVersion:
    """The version that a node's engines serve now for one policy."""

    policy: PolicyName
    incarnation: Count
    number: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """Something that a node is busy with, or waits for."""

    what: Label
    """Who has to act, such as `reward task:score` or `load of version policy.1.3`."""
    item: Label
    """What it is for: a row, a version."""
    since_s: Seconds
    """How long it has taken so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterRequest:
    """`POST /v1/nodes`. The same node with another boot_id is a new process: its old leases end."""

    node_id: Annotated[NodeId, SAFE]
    """The subject of its token, or that and `.SUFFIX`."""
    boot_id: Annotated[Id, Meta(min_length=1)]
    """Drawn at random by each process."""
    capacity: Annotated[int, Meta(ge=1, le=MAX_CAPACITY)]
    """Slots it can run concurrently."""
    policies: Annotated[tuple[PolicyName, ...], Meta(max_length=256)]
    """Policies it can serve; empty means all policies of the run."""
    tags: Annotated[tuple[Id, ...], Meta(max_length=16)] = ()


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The right to answer one slot, until the lease ends. A Struct, because creating this many
    frozen dataclasses would dominate the cost of a lease."""

    group_id: GroupId
    slot: int
    epoch: int
    attempt: int
    task: int
    """Index into the response's `tasks`: slots of a group share one task."""
    seed: int
    """Seed of this slot, the same on every node and attempt."""
    num_recorded: int = 0
    """Turns that an earlier attempt recorded, to be fetched and reused instead of generated
    again."""
    secret: str = ""
    """Proves that the caller holds this lease: sent with its result, its release and its turns."""

    @property
    def row_id(self) -> RowId:
        return row_id(self.group_id, self.slot, self.epoch)


class DeliveryStatus(StrEnum):
    STORED = "stored"
    """Durable now."""
    DUPLICATE = "duplicate"
    """The same bytes were stored before; equivalent to stored."""
    FENCED = "fenced"
    """The lease had already ended; nothing changed."""
    CONFLICT = "conflict"
    """Different bytes are already stored under this id; the first ones stay."""
    INVALID = "invalid"
    """The record breaks the contract; `detail` says how."""
