# SPDX-License-Identifier: Apache-2.0
"""What a run of a given size asks of its services, and what breaks first: arithmetic, no measuring.

Owns the measured and estimated limits that docs/explanation/growth.md explains. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

BYTES_PER_TOKEN = 9
"""Of a stored trajectory, measured: 72 KB for 8,000 tokens."""
PARTITION_ROWS_PER_S = 929
"""Half of the measured 1,858 rows of 72 KB that one partition stored on two slow cores."""
COORDINATOR_ROWS_PER_S = 200_000
"""Of its single writer; estimated."""
COORDINATOR_BYTES_PER_ROW = 100
HEARTBEATS_PER_S = 3_000
"""At which a partition does little else; estimated."""
DELTA_SHARE = 0.00575
"""Of the bytes of a version, measured where 0.9 % of the elements change: 92 MB of 16 GB."""
ORIGIN_BYTES_PER_S = 100e9 / 8
"""One network card of 100 Gbit/s."""
NODES_PER_RELAY = 32
HEARTBEATS_PER_TTL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is assumed of a run; docs/explanation/growth.md has the same defaults."""

    gpus: int
    rollout_share: float = 0.75
    tokens_per_gpu_s: float = 1_500.0
    trajectory_tokens: int = 8_000
    gpus_per_node: int = 8
    model_gb: float = 16.0
    version_s: float = 60.0
    """Seconds between two versions."""
    ttl_s: float = 12.0
    """`lease.ttl_s` in the run file."""
    cost_per_gpu_hour: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Something that breaks, and when."""

    what: str
    load: float
    """Demand as a share of what it can bear; above 1 it breaks."""
    at_gpus: int
    """The size at which its load would be 1."""
    then: str
    """What helps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    workload: Workload
    rollout_gpus: int
    train_gpus: int
    tokens_per_s: float
    trajectories_per_s: float
    payload_bytes_per_s: float
    coordinator_bytes_per_s: float
    nodes: int
    heartbeats_per_s: float
    """At each partition."""
    partitions: int
    relays: int
    """Behind the run's weight server, in one or more levels."""
    delta_bytes: float
    """Of one version."""
    fan_out_bytes: float
    """Deltas of one version to every node."""
    origin_s: float
    """To send them from one origin, without relays."""
    cost_per_hour: float
    cost_per_million_tokens: float
    """Of sampled tokens; training included."""
    limits: tuple[Limit, ...]
    """What breaks first comes first."""


def plan_capacity(load: Workload) -> CapacityPlan:
    """ValueError for a size or an assumption that makes no sense."""
    _check(load)
    rollout_gpus = load.gpus * load.rollout_share
    tokens_per_s = rollout_gpus * load.tokens_per_gpu_s
    rows_per_s = tokens_per_s / load.trajectory_tokens
    nodes = math.ceil(rollout_gpus / load.gpus_per_node)
    heartbeats = nodes / (load.ttl_s / HEARTBEATS_PER_TTL)
    delta = load.model_gb * 1e9 * DELTA_SHARE
    origin_s = nodes * delta / ORIGIN_BYTES_PER_S
    cost = load.gpus * load.cost_per_gpu_hour
    limits = _limits(load, rows_per_s, heartbeats, origin_s)
    return CapacityPlan(
        workload=load,
        rollout_gpus=round(rollout_gpus),
        train_gpus=load.gpus - round(rollout_gpus),
        tokens_per_s=tokens_per_s,
        trajectories_per_s=rows_per_s,
        payload_bytes_per_s=tokens_per_s * BYTES_PER_TOKEN,
        coordinator_bytes_per_s=rows_per_s * COORDINATOR_BYTES_PER_ROW,
        nodes=nodes,
        heartbeats_per_s=heartbeats,
        partitions=max(1, math.ceil(rows_per_s / PARTITION_ROWS_PER_S)),
        relays=_relays(nodes),
        delta_bytes=delta,
        fan_out_bytes=nodes * delta,
        origin_s=origin_s,
        cost_per_hour=cost,
        cost_per_million_tokens=cost / (tokens_per_s * 3600 / 1e6),
        limits=tuple(sorted(limits, key=lambda one: -one.load)),
    )


def _check(load: Workload) -> None:
    if load.gpus < 2:
        raise ValueError(f"{load.gpus} GPUs: a run needs at least one for rollout and one to train")
    if not 0 < load.rollout_share < 1:
        raise ValueError(f"a rollout share of {load.rollout_share:g} is not between 0 and 1")
    positive = ("tokens_per_gpu_s", "trajectory_tokens", "gpus_per_node", "model_gb", "version_s")
    for name in (*positive, "ttl_s"):
        if not getattr(load, name) > 0:
            raise ValueError(f"{name} must be greater than 0")


def _relays(nodes: int) -> int:
    """None for so few nodes that the origin is as close."""
    return math.ceil(nodes / NODES_PER_RELAY) if nodes > NODES_PER_RELAY else 0


def _limits(
    load: Workload, rows_per_s: float, heartbeats: float, origin_s: float
) -> Iterator[Limit]:
    found = (
        (
            "the weight server without relays",
            origin_s / load.version_s,
            "relays: then it sends one copy to each of the first level",
        ),
        (
            "heartbeats of every node at every partition",
            heartbeats / HEARTBEATS_PER_S,
            "a longer lease.ttl_s; the work of a dead node then waits longer",
        ),
        (
            "the coordinator's writer",
            rows_per_s / COORDINATOR_ROWS_PER_S,
            "longer trajectories; partitions that report groups are not built",
        ),
    )
    for what, share, then in found:
        yield Limit(what=what, load=share, at_gpus=math.floor(load.gpus / share), then=then)
