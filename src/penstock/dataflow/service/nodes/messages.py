# SPDX-License-Identifier: Apache-2.0
"""Request and response bodies of rollout nodes' calls: the contract for any rollout node.

Owns shapes only. Every mutating call carries an id chosen by its caller; repeating it is a no-op.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from penstock.bounds import MAX_ROW_BYTES, SAFE, Count, Id, Seconds
from penstock.dataflow.core.leasing import (
    Activity,
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
)
from penstock.types import (
    JsonObject,
    NodeId,
    PolicyName,
    PublishedVersion,
    RowId,
    SamplingSpec,
    Task,
    Turn,
)

LiveVersions = Annotated[tuple[LiveVersion, ...], Meta(max_length=256)]
"""One for each policy; a version of a policy that the run does not have is ignored."""

MAX_ROWS = 10_000
"""Deliveries and releases, or turns, in one call: each costs time even if it is refused."""
SECRET_HEADER = "x-penstock-secret"
"""Carries the secret of a call that has no body: the boot secret to leave, the secret of the lease
to fetch turns."""

# --- nodes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """How long a run waits for external agents."""

    reward_deadline_s: float
    """From the start of a session to the deadline for its reward."""
    idle_s: float
    """A session ends after `idle_s` without a call."""
    default_reward: float | None
    """Reward of a session that got none; None: do not train on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBaseModel:
    """Policies whose versions are adapters of one model: one engine serves them all."""

    policies: tuple[PolicyName, ...]
    rank: int
    """Rank of their largest adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolServerInfo:
    """A server of tools, as in `tools:` of the run file. A node starts and calls only what its own
    machine grants."""

    name: str
    command: tuple[str, ...] = ()
    url: str = ""
    builtin: str = ""
    folder: str = ""
    token: str = ""
    """The name of a secret of the node's machine."""
    is_shared: bool = False
    """By all attempts of a node."""
    timeout_s: float = 60.0
    max_result_chars: int = 8000


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """The environment of a source, as in the run file."""

    library: str
    """Whose bridge it is; empty for a custom program."""
    settings: JsonObject
    """What the bridge gets: what to load, its options, and how to read actions."""
    command: tuple[str, ...] = ()
    python: str = ""
    """Empty for the virtual environment of `make setup-envs`."""
    calls_model: bool = False
    max_episodes: int = 32
    start_timeout_s: float = 120.0
    reset_timeout_s: float = 60.0
    step_timeout_s: float = 60.0
    lease_s: float = 60.0
    before_step: str = ""
    after_step: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The engines of one policy in each node that serves it."""

    kind: str
    num_engines: int = 1
    options: tuple[str, ...] = ()
    """Additional arguments for an engine that is a separate program."""
    num_devices: int = 0
    """Devices of each engine, on a machine with devices; 0 for an engine that uses none."""
    keeps_kv: bool = False
    """Whether running answers keep their keys and values when new weights are loaded."""
    records_experts: bool = False
    """Answers carry the experts that a mixture chose, for a trainer that replays them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceInfo:
    """The settings of a source that has its own; each as in `RunInfo`."""

    name: str
    workflow: str
    reward: str
    sampling: SamplingSpec
    tools: tuple[str, ...] | None = None
    """Names of its tool servers; None: all."""
    env: EnvironmentInfo | None = None
    """What its workflow plays against; None if nothing."""
    policies: tuple[PolicyName, ...] = ()
    """Those that its workflow may call; empty: all of the run."""
    is_evaluation: bool = False
    """Its tasks are questions of an evaluation: the pinned versions answer them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Everything a node needs to know about the run; to join, it needs only the URL and a token."""

    run: str
    policies: tuple[PolicyName, ...]
    workflow: str
    """A name, `module:function`, or the JSON argument list of an external program."""
    reward: str
    """`module:function`, or empty when the workflow computes the reward."""
    sampling: SamplingSpec
    engine: str
    """Engine kind for each policy of the run."""
    torch_threads: int
    start_to_close_s: float
    transfer: Literal["auto", "delta", "full"] = "auto"
    """How a node fetches weights: in full, as deltas, or whichever is faster."""
    engine_options: tuple[str, ...] = ()
    """Additional arguments for an engine that is a separate program."""
    is_scored: bool = True
    """Nodes give the reward; false when a stage does and nodes deliver rows without one."""
    session: SessionSpec | None = None
    """For runs that learn from external agents."""
    is_deterministic: bool = False
    """Sampled bits must not depend on the other requests in the decoding batch."""
    adapters: tuple[SharedBaseModel, ...] = ()
    """Policies that train adapters, by base model."""
    sources: tuple[SourceInfo, ...] = ()
    """Sources that differ from the run in workflow, reward, sampling, tools or policies, or have an
    environment."""
    accepts_untrusted: bool = False
    """Nodes with an untrusted token may join; the trusted side checks their rows."""
    roles: Mapping[str, PolicyName] = field(default_factory=dict[str, PolicyName])
    """Policy by role; a policy's own name is a role too."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts of the prompt templates, by name."""
    tools: tuple[ToolServerInfo, ...] = ()
    """Servers whose tools workflows may call."""
    engines: Mapping[PolicyName, EngineInfo] = field(default_factory=dict[PolicyName, EngineInfo])
    """Engines by policy; one that is not listed has one engine of kind `engine`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDirectives:
    """Part of every response to a node."""

    wanted: tuple[PublishedVersion, ...]
    """Versions the node should load; empty until the trainer published number 0."""
    drain: bool = False
    """Finish or release your leases, then leave: the run has ended or the node is being drained."""
    finished: bool = False
    """The run is complete."""
    stop: tuple[RowId, ...] = ()
    """Leases of this node that have ended: stop that work, its results would be refused."""
    pinned: tuple[PublishedVersion, ...] = ()
    """Versions of the evaluation in progress, to be loaded beside the others; from the coordinator,
    empty means that none is in progress."""
    pause: str = ""
    """Why to generate nothing and keep all leases, such as `samples`: the node's resource is needed
    for training. Empty: go on. Only the coordinator says so."""
    is_shared: bool = False
    """The node's resource also trains: it sends heartbeats more often, to learn of a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionAddress:
    """A data partition in a separate process; nodes and trainers call it directly."""

    index: int
    url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterAnswer:
    orders: NodeDirectives
    weights_url: str
    heartbeat_s: float
    ttl_s: float
    """A node's leases expire after `ttl_s` without a heartbeat."""
    facts: RunInfo
    partitions: tuple[PartitionAddress, ...] = ()
    """Additional partitions; register, lease and send heartbeats there too."""
    secret: Id = ""
    """Boot secret: proves that the caller is this process of the node. Each partition has its
    own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """`PUT /v1/nodes/{id}`: renews all leases of the node."""

    boot_id: Id
    state: NodeState
    live: LiveVersions
    num_held: Count = 0
    secret: Id = ""
    """The boot secret from the registration."""
    pinned: LiveVersions = ()
    """Versions that are loaded for an evaluation."""
    work: Annotated[tuple[Activity, ...], Meta(max_length=16)] = ()
    """What it is busy with, the longest first; not all of it."""
    num_done: Count = 0
    """Model calls, environment calls, rewards and loads that it has finished; grows while it
    makes progress."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    orders: NodeDirectives
    weights_url: str
    partitions: tuple[PartitionAddress, ...] = ()


# --- leases and deliveries --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRequest:
    """`POST /v1/leases`: lease up to n slots; held open for `wait_s` when there is no work."""

    request_id: Id
    """A repeated request gets the same grants, so a lost response loses nothing."""
    node_id: Annotated[NodeId, SAFE]
    boot_id: Id
    max_slots: Count
    wait_s: Seconds
    live: LiveVersions
    secret: Id = ""
    """The boot secret from the registration."""
    pinned: LiveVersions = ()
    """Versions that are loaded for an evaluation."""


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
    index: Count
    """Position among the turns of this attempt."""
    turn: Turn
    is_reused: bool = False
    """An earlier attempt generated it."""
    secret: Id = ""
    """The secret of the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRequest:
    node_id: Annotated[NodeId, SAFE]
    turns: Annotated[tuple[RecordedTurn, ...], Meta(max_length=MAX_ROWS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsAnswer:
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    row_id: RowId
    payload: Annotated[memoryview, Meta(max_length=MAX_ROW_BYTES)]
    """A msgpack Trajectory, stored and sent to trainers byte for byte; on the receiving side a view
    of the request body."""
    blob: Annotated[str, Meta(max_length=64)] = ""
    """Empty, or the digest of a payload above 1 MB, uploaded before by `PUT /v1/blobs/{digest}`;
    `payload` is then empty. The store of blobs checks that it is one."""
    secret: Id = ""
    """The secret of the lease."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryRequest:
    """`POST /v1/trajectories`."""

    node_id: Annotated[NodeId, SAFE]
    boot_id: Id
    deliveries: Annotated[tuple[Delivery, ...], Meta(max_length=MAX_ROWS)]
    released: Annotated[dict[RowId, Id], Meta(max_length=MAX_ROWS)] = field(
        default_factory=dict[RowId, str]
    )
    """Slots released without a result: the row id that each would have had, and the secret of its
    lease."""


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
