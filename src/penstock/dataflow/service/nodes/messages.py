# SPDX-License-Identifier: Apache-2.0
"""Bodies of the dataflow service's HTTP calls: the contract that any rollout node or trainer may
speak.

Owns shapes only. Every mutating call carries an id chosen by its caller; repeating it changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.dataflow.core.leasing import DeliveryStatus, Grant, LiveVersion, NodeState
from penstock.types import (
    NodeId,
    PolicyName,
    PublishedVersion,
    RowId,
    SamplingSpec,
    Task,
    Turn,
)

# --- nodes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """How long a run waits for agents from outside."""

    reward_deadline_s: float
    """From the opening of a session until its reward must be there."""
    idle_s: float
    """Without a call for so long a session has ended."""
    default_reward: float | None
    """Of a session for which none came; None: it is never trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBaseModel:
    """Policies whose versions are adapters of one model: one engine serves them all."""

    policies: tuple[PolicyName, ...]
    rank: int
    """The largest of their adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What a node must know of the run; a joiner needs nothing but the URL and a token."""

    run: str
    policies: tuple[PolicyName, ...]
    workflow: str
    """A name, `module:function`, or a JSON list of words for an external program."""
    reward: str
    """`module:function`, or empty when the workflow scores by itself."""
    sampling: SamplingSpec
    engine: str
    """Engine kind for each policy of the run."""
    torch_threads: int
    start_to_close_s: float
    transfer: Literal["auto", "delta", "full"] = "auto"
    """How a node fetches weights: whole, as changes, or as is sooner."""
    engine_options: tuple[str, ...] = ()
    """More words for an engine that is a program of its own."""
    is_scored: bool = True
    """Nodes give the reward; false when a stage does, and rows come without one."""
    session: SessionSpec | None = None
    """Of runs that learn from agents outside of them."""
    is_deterministic: bool = False
    """An answer's bits may not depend on what else is decoded with it."""
    adapters: tuple[SharedBaseModel, ...] = ()
    """Policies that train adapters, by base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDirectives:
    """Rides on every answer to a node."""

    wanted: tuple[PublishedVersion, ...]
    """Versions the node should load; empty until the trainer published number 0."""
    drain: bool = False
    """Finish or hand back what you hold, then leave: the run has ended or you were drained."""
    finished: bool = False
    """The whole run is complete."""
    stop: tuple[RowId, ...] = ()
    """Leases of this node that were ended: a result would be refused, so stop working on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAddress:
    """A data partition in a process of its own; nodes and trainers go to it directly."""

    index: int
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAnswer:
    orders: NodeDirectives
    weights_url: str
    heartbeat_s: float
    ttl_s: float
    """Leases of a node that is silent for so long are given to others."""
    facts: RunInfo
    partitions: tuple[PartitionAddress, ...] = ()
    """Further partitions, to be joined, asked and beaten to in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """`PUT /v1/nodes/{id}`: renews all leases of the node at once."""

    boot_id: str
    state: NodeState
    live: tuple[LiveVersion, ...]
    num_held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    orders: NodeDirectives
    weights_url: str
    partitions: tuple[PartitionAddress, ...] = ()


# --- leases and deliveries --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """`POST /v1/leases`: up to n slots; held open for `wait_s` when there is no work."""

    request_id: str
    """A repeated request gets the same grants, so an answer lost on the way loses nothing."""
    node_id: NodeId
    boot_id: str
    max_slots: int
    wait_s: float
    live: tuple[LiveVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer:
    tasks: tuple[Task, ...]
    grants: tuple[Grant, ...]
    orders: NodeDirectives


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTurn:
    """A finished turn of an attempt that still runs."""

    row_id: RowId
    """The row that the attempt will become."""
    index: int
    """Among the turns of this attempt."""
    turn: Turn
    is_reused: bool = False
    """An earlier attempt generated it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRequest:
    node_id: NodeId
    turns: tuple[RecordedTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsAnswer:
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    row_id: RowId
    payload: memoryview
    """A msgpack Trajectory, stored and served byte for byte; where it arrives, a view of the call's
    body."""
    blob: str = ""
    """Digest under which a payload above 1 MB went ahead by `PUT /v1/blobs/{digest}`; `payload` is
    empty then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRequest:
    """`POST /v1/trajectories`."""

    node_id: NodeId
    boot_id: str
    deliveries: tuple[Delivery, ...]
    released: tuple[RowId, ...] = ()
    """Slots handed back without a result, by the row id they would have had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryResult:
    row_id: RowId
    status: DeliveryStatus
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryAnswer:
    results: tuple[DeliveryResult, ...]
    durability: str = "D1"
    """Fsynced before this answer was sent."""


# --- trainers ---------------------------------------------------------------------------------


# --- people -----------------------------------------------------------------------------------
