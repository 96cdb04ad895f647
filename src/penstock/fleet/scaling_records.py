# SPDX-License-Identifier: Apache-2.0
"""What operators asked of the rollout pool, and what the autoscaler did: two files of a run folder.

Plain data; `run_folder` reads and writes it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequest:
    """`run/scale.json`: the last wish of an operator about the rollout pool."""

    at: float
    who: str
    why: str = ""
    gpus: int | None = None
    """The wanted size; None: as it is."""
    mode: str | None = None
    """`act` or `recommend`; None: as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagedNode:
    """A node that the autoscaler started."""

    node_type: str
    started_at: float
    is_leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleAction:
    """Something that the autoscaler did or said."""

    at: float
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecord:
    """`run/autoscaler.json`: what the autoscaler wants and has started; survives its launcher."""

    mode: str
    wanted_gpus: int | None = None
    """None: as many as the run file starts."""
    missing_gpus: int = 0
    """Wanted, but no node type may start more nodes."""
    next_number: int = 0
    """For the name of the next node."""
    nodes: dict[str, ManagedNode] = field(default_factory=dict[str, ManagedNode])
    request_at: float = 0.0
    """Of the last request that was followed."""
    decided_at: float = 0.0
    """Of the last decision of the rule that was followed."""
    actions: tuple[ScaleAction, ...] = ()
    """The last ones, oldest first."""
