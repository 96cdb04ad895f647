# SPDX-License-Identifier: Apache-2.0
"""Terms of leasing that the core and the wire share: nodes, grants, and what became of a delivery.

Owns shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from penstock.types import (
    GroupId,
    NodeId,
    PolicyName,
)


class NodeState(StrEnum):
    STARTING = "starting"
    """Joined, no engine live yet; gets no leases."""
    LIVE = "live"
    DRAINING = "draining"
    """Finishes what it holds; gets no leases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveVersion:
    """What a node's engines serve now for one policy."""

    policy: PolicyName
    incarnation: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterRequest:
    """`POST /v1/nodes`. The same node with another boot_id is a new process: its old leases end."""

    node_id: NodeId
    boot_id: str
    """Drawn anew by each process."""
    capacity: int
    """Slots it runs at once."""
    policies: tuple[PolicyName, ...]
    """Policies it can serve; empty means all of the run."""
    tags: tuple[str, ...] = ()


class Grant(msgspec.Struct, frozen=True, kw_only=True):
    """The right to answer one slot, until the lease ends. A Struct, because so many are made that
    a frozen dataclass would cost more than all else in a lease."""

    group_id: GroupId
    slot: int
    epoch: int
    attempt: int
    task: int
    """Index into the answer's `tasks`: slots of a group share one."""
    seed: int
    """For this slot, whatever node or attempt runs it."""
    num_recorded: int = 0
    """Turns that an earlier attempt left, to be fetched and served instead of generated again."""


class DeliveryStatus(StrEnum):
    STORED = "stored"
    """Durable now."""
    DUPLICATE = "duplicate"
    """The same bytes were stored before; as good as stored."""
    FENCED = "fenced"
    """The lease ended before; nothing changed."""
    CONFLICT = "conflict"
    """Other bytes stand under this id; the first stay."""
    INVALID = "invalid"
    """The record breaks the contract; `detail` says how."""
