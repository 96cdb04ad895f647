# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls of operators and their tools: state of a run, forgetting a session.

Owns shapes only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from penstock.bounds import Count, Finite, Id
from penstock.dataflow.core.leasing import Activity, LiveVersion
from penstock.dataflow.core.spot_checks import CheckCounts
from penstock.dataflow.core.stalls import Link
from penstock.types import (
    JsonObject,
    NodeId,
    PolicyName,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForgetSessionAnswer:
    """`DELETE /v1/sessions/{id}`."""

    session: str
    was: str
    """State before: `running`, `waiting` for a batch, `sealed` into one, `trained`, `dropped`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTags:
    """`PUT /v1/nodes/{node_id}/tags`."""

    node_id: str
    tags: tuple[str, ...]
    """All that it has now; `rollout` unless it was taken away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionMetrics:
    """Metrics that a partition in another process reports to the coordinator."""

    num_waiting: Count = 0
    num_open: Count = 0
    num_nodes: Count = 0
    trajectories: Count = 0
    sampled_tokens: Count = 0
    untrusted_tokens: Count = 0
    failed_tokens: Count = 0
    salvaged_tokens: Count = 0
    tokens_per_s: Finite = 0.0
    missing_stages: Annotated[tuple[Id, ...], Meta(max_length=1024)] = ()
    """Stages without a live worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStatus:
    index: int
    url: str
    state: str
    num_open: int
    silent_s: float
    figures: PartitionMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    node_id: NodeId
    state: str
    live: tuple[LiveVersion, ...]
    num_leases: int
    capacity: int
    silent_s: float
    delivered: int
    work: tuple[Activity, ...] = ()
    """What it is busy with, the longest first, by its last heartbeat."""
    num_done: int = 0
    """Model calls, environment calls, rewards and loads that it has finished."""
    is_untrusted: bool = False
    """It joined with an untrusted token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartStatus:
    """What one role of a policy did in the groups of one source, since the start of the service."""

    source: str
    role: str
    """Empty for turns without a role."""
    groups: int
    """Groups that rules judged."""
    dropped: dict[str, int]
    """Groups that were dropped, by reason."""
    rows: int
    """Trajectories of the judged groups in which it took part."""
    tokens: int
    reward_mean: float | None
    """Mean of its reward over those trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyStatus:
    policy: PolicyName
    incarnation: int
    number: int
    steps: int
    published: int
    issued: int
    """Groups issued to nodes, not yet judged."""
    ready: int
    """Groups admitted, not yet sealed."""
    sealed: int
    """Batches sealed, not yet committed."""
    room: int
    reward_mean: float | None
    """Mean over the rows of the newest sealed batch."""
    staleness_mean: float | None
    staleness_max: int | None
    stats: dict[str, float]
    """Stats of the newest commit, as the trainer reported them."""
    skipped: int = 0
    """Batches that were not trained; each adds a batch and no step."""
    last_skip: str = ""
    """Why the newest of them was skipped."""
    resumed_at: int = 0
    """The step of the checkpoint that the trainer resumed from."""
    repeats_to: int = 0
    """Last step that is trained again since then; 0 if none is."""
    parts: tuple[PartStatus, ...] = ()
    """By source and role."""
    progress: int = 0
    """Micro-batches that its trainer has finished since its start; grows within a step."""
    partner_lag: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """By other policy: rows sealed since the start of the service, by how many versions its oldest
    token was behind its newest version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitStatus:
    """One wait: who waits, for what, and since when."""

    who: str
    on: str
    since_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationStatus:
    """Evaluations of one policy."""

    policy: PolicyName
    last: int | None
    """The version that was evaluated last; None before the first."""
    scores: dict[str, float]
    """Its mean score by suite; failed attempts count as 0."""
    best: int | None
    """The best version so far, by the score of `eval.best`."""
    running: int | None
    """The version that is evaluated now."""
    num_answered: int
    """Questions that it has answered."""
    num_questions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """`GET /v1/status`."""

    run: str
    uptime_s: float
    finished: bool
    policies: tuple[PolicyStatus, ...]
    nodes: tuple[NodeStatus, ...]
    waiting: tuple[WaitStatus, ...]
    trajectories: int
    sampled_tokens: int
    wasted_tokens: dict[str, int]
    """Tokens generated and never trained, by reason."""
    tokens_per_s: float
    untrusted_tokens: int = 0
    """Sampled tokens that untrusted nodes delivered; they count for no budget."""
    salvaged_tokens: int = 0
    """Tokens reused by retries instead of being generated again."""
    partitions: tuple[PartitionStatus, ...] = ()
    """Partitions in separate processes."""
    detail: JsonObject = field(default_factory=dict[str, object])
    """`failing_rules`: the last error of each rule."""
    alarms: tuple[str, ...] = ()
    """Policies that get no batch, or wait long for one, with the reason."""
    checks: dict[str, CheckCounts] = field(default_factory=dict[str, CheckCounts])
    """Rows of untrusted credentials that were generated again, by subject, and what it cost."""
    evaluation: EvaluationStatus | None = None
    """None without `eval`."""
    failed: str = ""
    """Why the run has to end: all its groups fail. No new work starts; empty otherwise."""
    chain: tuple[Link, ...] = ()
    """Who waits for whom, from the trainer that waits longest to who has to act next."""
