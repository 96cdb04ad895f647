# SPDX-License-Identifier: Apache-2.0
"""Bodies of the dataflow service's HTTP calls: the contract that any rollout node or trainer may
speak.

Owns shapes only. Every mutating call carries an id chosen by its caller; repeating it changes
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

import msgspec

from penstock.types import (
    GroupId,
    JsonObject,
    Manifest,
    NodeId,
    PolicyName,
    PublishedVersion,
    RowId,
    SamplingSpec,
    Task,
    Turn,
)

# --- nodes ------------------------------------------------------------------------------------


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
class Register:
    """`POST /v1/nodes`. The same node with another session is a new life: its old leases end."""

    node_id: NodeId
    session: str
    """Drawn anew by each process."""
    capacity: int
    """Slots it runs at once."""
    policies: tuple[PolicyName, ...]
    """Policies it can serve; empty means all of the run."""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    """How long a run waits for agents from outside."""

    reward_deadline_s: float
    """From the opening of a session until its reward must be there."""
    idle_s: float
    """Without a call for so long a session has ended."""
    default_reward: float | None
    """Of a session for which none came; None: it is never trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBase:
    """Policies whose versions are adapters of one model: one engine serves them all."""

    policies: tuple[PolicyName, ...]
    rank: int
    """The largest of their adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
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
    session: SessionTerms | None = None
    """Of runs that learn from agents outside of them."""
    is_deterministic: bool = False
    """An answer's bits may not depend on what else is decoded with it."""
    adapters: tuple[SharedBase, ...] = ()
    """Policies that train adapters, by base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
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
class Registered:
    orders: Orders
    weights_url: str
    heartbeat_s: float
    ttl_s: float
    """Leases of a node that is silent for so long are given to others."""
    facts: RunFacts
    partitions: tuple[PartitionAddress, ...] = ()
    """Further partitions, to be joined, asked and beaten to in the same way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """`PUT /v1/nodes/{id}`: renews all leases of the node at once."""

    session: str
    state: NodeState
    live: tuple[LiveVersion, ...]
    num_held: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    orders: Orders
    weights_url: str
    partitions: tuple[PartitionAddress, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetAnswer:
    """`DELETE /v1/sessions/{id}`."""

    session: str
    was: str
    """Where it was: `running`, `waiting` for a batch, `sealed` into one, `trained`, `dropped`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A call that has nothing to say but yes."""

    ok: bool = True


# --- leases and deliveries --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """`POST /v1/leases`: up to n slots; held open for `wait_s` when there is no work."""

    request_id: str
    """A repeated request gets the same grants, so an answer lost on the way loses nothing."""
    node_id: NodeId
    session: str
    max_slots: int
    wait_s: float
    live: tuple[LiveVersion, ...]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseAnswer:
    tasks: tuple[Task, ...]
    grants: tuple[Grant, ...]
    orders: Orders


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
    session: str
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationRequest:
    """`POST /v1/policies/{policy}/incarnations`: become this policy's one trainer."""

    request_id: str
    expected: int
    """The current incarnation as the caller knows it (0 before the first); compare-and-set."""
    number: int
    """Fork point: the version number of the checkpoint it restored, 0 for the initial model."""
    seq: int
    """Fork point: the last batch inside that checkpoint, 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IncarnationAnswer:
    incarnation: int
    steps: int
    """Train until this version number, then expect `end`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyState:
    """`GET /v1/policies/{policy}`: where the ledger says this policy stands."""

    policy: PolicyName
    incarnation: int
    number: int
    """Committed along the surviving lineage."""
    seq: int
    published: int
    """Newest published number of this incarnation, -1 for none."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequest:
    """`POST /v1/batches`: the sealed manifest number `seq`; held open until it exists."""

    consumer: PolicyName
    seq: int
    incarnation: int
    wait_s: float = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAnswer:
    manifest: Manifest | None
    """None with `end` unset: not yet, ask again."""
    digest: str = ""
    end: bool = False
    """No batch will follow; the run is complete for this consumer."""
    checkpoint_now: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPayload:
    row_id: RowId
    payload: bytes | None
    """None: the row is gone, every rank sees it masked; or it lies at another partition."""
    at: str = ""
    """Where to fetch it: `POST {at}/v1/rows`."""
    columns: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Values of the further columns that the manifest names for it."""
    filler: bytes = b""
    """Means nothing: a row found damaged while its answer was under way is as long as announced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRowsRequest:
    """`POST /v1/batches/{consumer}.{seq}/rows`: what one rank trains of a sealed batch."""

    indexes: tuple[int, ...] | None = None
    """Places of its rows in the manifest, counted from 0; None for all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsAnswer:
    """Rows in the order asked for."""

    rows: tuple[RowPayload, ...]
    columns: tuple[str, ...] = ()
    """Further columns that the manifest names; ask for them where a row lies elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsRequest:
    """`POST /v1/rows` at the partition that holds them."""

    row_ids: tuple[RowId, ...]
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRequest:
    """`POST /v1/batches/{consumer}.{seq}/commit`."""

    incarnation: int
    number: int
    """The version number after this batch: one more when trained, the same when skipped."""
    skipped: str = ""
    """Reason, when the batch changed no weights."""
    stats: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRequest:
    """`POST /v1/policies/{policy}/versions`: compare-and-set; the store already holds every
    byte."""

    incarnation: int
    number: int
    manifest_digest: str
    weights_digest: str
    """BLAKE3 over the tensors alone: versions with equal weights are one version, whoever made
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsRequest:
    """`PUT /v1/policies/{policy}/checkpoints`: what the trainer could restore from."""

    incarnation: int
    retained: tuple[tuple[int, int], ...]
    """(number, seq) of each complete checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantineRequest:
    """`POST /v1/nodes/{node_id}/quarantine`: this node's log-probs are not those of its version."""

    policy: PolicyName
    incarnation: int
    why: str
    """For the log and for people."""
    session: str = ""
    """The life of the node that made the rows, as they say; empty: the one that runs now."""


class UsedBy(StrEnum):
    NEWEST = "newest"
    """Nodes are told to serve it, or were a moment ago."""
    NODE = "node"
    CHECKPOINT = "checkpoint"
    ROWS = "rows"
    """Rows that may be trained, or trained again, were sampled from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInUse:
    policy: PolicyName
    incarnation: int
    number: int
    manifest_digest: str
    by: UsedBy


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionsInUse:
    """`GET /v1/versions`: of all policies; a weight store may let go of the others."""

    versions: tuple[VersionInUse, ...]


# --- people -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionFigures:
    """What home shows of a partition it cannot look into."""

    num_waiting: int = 0
    num_open: int = 0
    num_nodes: int = 0
    trajectories: int = 0
    sampled_tokens: int = 0
    failed_tokens: int = 0
    salvaged_tokens: int = 0
    tokens_per_s: float = 0.0
    lacks: tuple[str, ...] = ()
    """Stages without a live worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    index: int
    url: str
    state: str
    num_open: int
    silent_s: float
    figures: PartitionFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    node_id: NodeId
    state: str
    live: tuple[LiveVersion, ...]
    num_leases: int
    capacity: int
    silent_s: float
    delivered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    policy: PolicyName
    incarnation: int
    number: int
    steps: int
    published: int
    issued: int
    """Groups out with nodes, not yet judged."""
    ready: int
    """Groups admitted, not yet sealed."""
    sealed: int
    """Batches sealed, not yet committed."""
    room: int
    reward_mean: float | None
    """Over the rows of the newest sealed batch."""
    staleness_mean: float | None
    staleness_max: int | None
    stats: dict[str, float]
    """The newest commit's, as the trainer reported them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Who waits for whom, and since when."""

    who: str
    on: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`GET /v1/status`."""

    run: str
    uptime_s: float
    finished: bool
    policies: tuple[PolicyStatus, ...]
    nodes: tuple[NodeStatus, ...]
    waiting: tuple[Waiting, ...]
    trajectories: int
    sampled_tokens: int
    wasted_tokens: dict[str, int]
    """Generated and never trained, by reason."""
    tokens_per_s: float
    salvaged_tokens: int = 0
    """Not generated again after an attempt was lost."""
    partitions: tuple[PartitionStatus, ...] = ()
    """Those in processes of their own."""
    detail: JsonObject = field(default_factory=dict[str, object])
    """`failing_rules`: by rule, what it raised last."""
    alarms: tuple[str, ...] = ()
    """Policies that get no batch, or wait long for one, and why."""
