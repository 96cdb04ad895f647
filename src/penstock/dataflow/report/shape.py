# SPDX-License-Identifier: Apache-2.0
"""The published balance report: `GET /v1/report` and its JSON schema.

The field docstrings are the descriptions in the schema. Increase SCHEMA_VERSION when the meaning of
a field changes, not when a field is added."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Literal

from msgspec import Meta

from penstock.types import NodeId, PolicyName

SCHEMA_VERSION = 1

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
StatusName = Literal["healthy", "suspect", "gone"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Trajectories, their sampled tokens of one policy, and how long their sandboxes were open. A
    trajectory with turns of two policies counts once for each, and so do its sandboxes."""

    sequences: Count
    tokens: Count
    sandbox_ms: Count = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            sequences=self.sequences + other.sequences,
            tokens=self.tokens + other.tokens,
            sandbox_ms=self.sandbox_ms + other.sandbox_ms,
        )

    def __sub__(self, other: Amount) -> Amount:
        return Amount(
            sequences=self.sequences - other.sequences,
            tokens=self.tokens - other.tokens,
            sandbox_ms=self.sandbox_ms - other.sandbox_ms,
        )


ZERO = Amount(sequences=0, tokens=0)


class ScalingBranch(StrEnum):
    SCALE_UP = "scale_up"
    HOLD = "hold"
    SCALE_DOWN = "scale_down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Production:
    """Data flow of a policy, in a window or since the run started."""

    produced: Amount
    """Delivered by nodes, whatever the outcome."""
    entered: Amount
    """Not rejected by group closing, pacing or a rule; includes data that becomes stale later."""
    consumed: Amount
    """Sealed into a batch for the first time."""
    replayed: Amount
    """Sealed into a batch again; needs no rollout, so it is not part of any rate."""
    stale_skipped: Amount
    """Entered, then became too stale. Informational: the rule does not use it."""
    wasted: dict[str, Amount]
    """Never trained, by reason."""
    accept_rate: Ratio | None
    """Entered tokens per produced token; rates are null if their divisor is 0."""
    stale_rate: Ratio | None
    """Stale tokens per entered token."""
    produce_consume_ratio: Ratio | None
    """Produced tokens per consumed token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowReport:
    """The part of the run that the decision is based on: K versions of some policy."""

    index: Count
    """0, 1, 2, … since the service started."""
    complete: bool
    """False: the first window is still open, and nothing is decided."""
    opened_at: float
    """Unix seconds, like every `_at` and `_until` in this report."""
    closed_at: float

    @property
    def wall_s(self) -> float:
        return max(0.0, self.closed_at - self.opened_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyWindow:
    """Timing and data flow of one policy in the window."""

    num_versions: Count
    """Batches committed."""
    wall_time_s: Seconds
    eval_time_s: Seconds
    training_time_s: Annotated[float, Meta(ge=1)]
    """Wall time without evaluation, at least 1."""
    avg_step_time_s: Seconds | None
    """Average time from one batch request to the next, without evaluation."""
    avg_batch_wait_s: Seconds | None
    """Average time from a batch request to its batch."""
    rollout_wait_fraction: Share | None
    """Sum of waits divided by sum of steps, at most 0.95; null if no step was measured."""
    num_samples: Count
    """Steps measured, without the first one after a start or an evaluation."""
    production: Production
    throughput_per_gpu: Ratio | None
    """Entered tokens per GPU."""
    staleness_histogram: dict[str, Amount]
    """Consumed rows by staleness: versions between their oldest token and the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queues:
    """Current queue lengths."""

    issued_groups: Count
    """Groups in progress on nodes."""
    ready_groups: Count
    """Groups admitted, not sealed."""
    sealed_batches: Count
    """Batches sealed, not committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAccount:
    """Wall-clock time by activity; shares sum to 1."""

    total_s: Seconds
    seconds: dict[str, Seconds]
    shares: dict[str, Share]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    policy: PolicyName
    done: bool
    """Has trained all its steps and does not affect the decision."""
    window: PolicyWindow
    totals: Production
    queues: Queues
    trainer_time: TimeAccount
    """Time of its trainer since `since`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    node_id: NodeId
    status: StatusName
    """Suspect: missed heartbeats. Gone: silent for a full ttl, or left."""
    activity: str
    gpus: Count
    """From its tag `gpus=N`; 1 without the tag. 0 for an untrusted node: it counts for nothing in
    the size of the pool."""
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
    """GPUs of healthy nodes with a live engine: G in the rule."""
    nodes_healthy: Count
    nodes_pending: Count
    """Joined, no engine live yet; counted as capacity."""
    pending_gpus: Count
    nodes_draining: Count
    suspect: tuple[NodeId, ...]
    gone: tuple[NodeId, ...]
    cost_per_hour: float
    """Cost of all nodes that are not gone."""
    waiting_slots: Count
    """Slots issued but not leased by any node."""
    busy_share: Share | None
    """Share of the serving nodes' time in the window with a slot or loading weights."""
    loading_share: Share | None
    """Share of the serving nodes' time in the window spent loading weights."""
    node_start_s_p90: Seconds
    """90th percentile of node start times, from joining to the first live engine."""
    produced: Amount
    accepted: Amount
    """Sums over the nodes below, in the window."""
    node_time: TimeAccount
    """Time of all nodes together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionReport:
    branch: ScalingBranch
    at: float
    gpus_before: Count
    target_gpus: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Result of the three-zone rule for the window: a recommendation, or what the autoscaler does
    in mode `act`."""

    branch: ScalingBranch
    target_gpus: Count
    estimated_delta_gpus: int
    """GPUs to start, or to drain if negative; pending nodes count as present."""
    reason: str
    rollout_wait_fraction: Share | None
    """The highest of all policies that share the pool."""
    need: Ratio | None
    """Share of the pool's capacity that was used, for the policy with the highest share."""
    weight_transfer_active: bool
    """Loading weights took too much of the window for waits to be meaningful."""
    drain_first: tuple[NodeId, ...]
    """On scale-down: suspect nodes, then those with the fewest tokens per second and cost."""
    low_windows: Count
    """Consecutive windows in the low zone, including this one."""
    decided_at: float
    last_action: ActionReport | None
    cooldown_until: float
    """No further action before this time; 0 if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Thresholds in effect."""

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
    """When the dataflow service started; time accounts count from here."""
    window: WindowReport
    decision: Decision
    pool: PoolReport
    policies: tuple[PolicyReport, ...]
    nodes: tuple[NodeReport, ...]
    thresholds: Thresholds
    schema_version: int = field(default=SCHEMA_VERSION)
