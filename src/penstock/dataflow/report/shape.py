# SPDX-License-Identifier: Apache-2.0
"""The balance report as it is published: `GET /v1/report`, and its JSON schema.

Owns names and meanings; a reader needs nothing else. A field that changes its meaning raises
SCHEMA_VERSION, a new one does not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

from penstock.dataflow.report.figures import ScalingBranch
from penstock.types import NodeId, PolicyName

SCHEMA_VERSION = 1

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
StatusName = Literal["healthy", "suspect", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Trajectories, and their sampled tokens of one policy."""

    sequences: Count
    tokens: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Production:
    """What went through the flow, in a window or since the run began."""

    produced: Amount
    """Delivered by nodes, whatever the outcome."""
    entered: Amount
    """Refused neither by closing, nor by pacing, nor by a rule; counted before any of it
    expires."""
    consumed: Amount
    """Sealed into a batch for the first time."""
    replayed: Amount
    """Sealed into batches again; costs no rollout, so no rate counts it."""
    stale_skipped: Amount
    """Entered, then grew too old. Advisory: the rule does not look at it."""
    wasted: dict[str, Amount]
    """Never trained, by reason."""
    accept_rate: Ratio | None
    """Entered tokens per produced token; rates are null while their divisor is 0."""
    stale_rate: Ratio | None
    """Stale tokens per entered token."""
    produce_consume_ratio: Ratio | None
    """Produced tokens per consumed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """The stretch of the run that the decision rests on."""

    index: Count
    complete: bool
    """False: the first window is still running, and nothing is decided."""
    opened_at: float
    """Unix seconds, as every `_at` and `_until` here."""
    closed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWindow:
    """One policy's own clock in the window."""

    num_versions: Count
    """Batches committed."""
    wall_time_s: Seconds
    eval_time_s: Seconds
    training_time_s: Annotated[float, Meta(ge=1)]
    """Wall time without evaluation, at least 1."""
    avg_step_time_s: Seconds | None
    """From asking for a batch to asking for the next, evaluation left out."""
    avg_batch_wait_s: Seconds | None
    rollout_wait_fraction: Share | None
    """Sum of waits by sum of steps, at most 0.95; null when no step was measured."""
    num_samples: Count
    """Steps measured; the first one after a start or an evaluation is none."""
    production: Production
    throughput_per_gpu: Ratio | None
    """Entered tokens per GPU."""
    staleness_histogram: dict[str, Amount]
    """Rows consumed, by how many versions their oldest token was behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """How much stands between the stations now."""

    issued_groups: Count
    """Out with nodes."""
    ready_groups: Count
    """Admitted, not sealed."""
    sealed_batches: Count
    """Not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount:
    """What somebody did with their wall clock; shares sum to 1."""

    total_s: Seconds
    seconds: dict[str, Seconds]
    shares: dict[str, Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    policy: PolicyName
    done: bool
    """Has trained all its steps; has no voice in the decision."""
    window: PolicyWindow
    totals: Production
    queues: Queues
    trainer_time: TimeAccount
    """Of its trainer, since `since`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    node_id: NodeId
    status: StatusName
    """Suspect: missed heartbeats. Gone: silent for a whole ttl, or left."""
    activity: str
    gpus: Count
    """From its tag `gpus=N`; a node without one counts as 1."""
    cost_per_hour: float
    """From its tag `cost=X`."""
    leases: Count
    capacity: Count
    silent_s: Seconds
    produced: Amount
    accepted: Amount
    """Both in the window, over all policies."""
    accept_rate: Ratio | None
    throughput_per_gpu: Ratio | None
    """Accepted tokens per GPU."""
    time: TimeAccount
    """Since it joined, or since `since`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """The rollout pool, which all policies share."""

    total_gpus: Count
    """Of nodes that are healthy and serve: the G of the rule."""
    nodes_healthy: Count
    nodes_pending: Count
    """Joined, no engine live yet; capacity already."""
    pending_gpus: Count
    nodes_draining: Count
    suspect: tuple[NodeId, ...]
    gone: tuple[NodeId, ...]
    cost_per_hour: float
    """Of all nodes but those gone."""
    waiting_slots: Count
    """Issued, and held by no node."""
    busy_share: Share | None
    """Of the serving nodes' time in the window: held a slot, or loaded weights."""
    loading_share: Share | None
    node_start_s_p90: Seconds
    produced: Amount
    accepted: Amount
    """Sums over the nodes below, in the window."""
    node_time: TimeAccount
    """Of all nodes together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionReport:
    branch: ScalingBranch
    at: float
    gpus_before: Count
    target_gpus: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the three-zone rule says after the window. A recommendation: nothing acts on it by
    itself."""

    branch: ScalingBranch
    target_gpus: Count
    estimated_delta_gpus: int
    """To start (or, below 0, to drain), with pending joins counted as there."""
    reason: str
    rollout_wait_fraction: Share | None
    """The worst of the policies that share the pool."""
    need: Ratio | None
    """The largest part, over policies, of what the pool could have brought in that was used."""
    weight_transfer_active: bool
    """Loading weights took so much of the window that waits say nothing about the pool."""
    drain_first: tuple[NodeId, ...]
    """On scale-down: suspect ones, then by the least tokens per second and cost."""
    low_windows: Count
    decided_at: float
    last_action: ActionReport | None
    cooldown_until: float
    """No other action before this; 0 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What the rule was told."""

    tau_low: float
    tau_high: float
    rho: float
    window_versions: Count
    min_gpus: int
    max_gpus: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceReport:
    """`GET /v1/report`."""

    run: str
    at: float
    since: float
    """When this life of the dataflow service began; time accounts count from here."""
    window: WindowReport
    decision: Decision
    pool: PoolReport
    policies: tuple[PolicyReport, ...]
    nodes: tuple[NodeReport, ...]
    thresholds: Thresholds
    schema_version: int = field(default=SCHEMA_VERSION)
