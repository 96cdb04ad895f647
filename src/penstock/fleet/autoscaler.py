# SPDX-License-Identifier: Apache-2.0
"""Which nodes to start and to retire for a wanted size of the rollout pool: pure functions.

Owns the choice of nodes: spot first, then the cheapest; dead and slow nodes leave first. The size
itself is decided by the three-zone rule of the balance report, or by an operator. Starts nothing,
reads no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class ScaleMode(StrEnum):
    RECOMMEND = "recommend"
    """Say what the rule decided; only an operator changes the pool."""
    ACT = "act"
    """Change the pool as the rule decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeType:
    """A kind of node that can be started."""

    name: str
    gpus: int = 1
    cost_per_hour: float = 0.0
    spot: bool = False
    max_nodes: int | None = None

    @property
    def rank(self) -> tuple[bool, float, str]:
        """Start those with the lowest rank first."""
        return not self.spot, self.cost_per_hour / self.gpus, self.name


class NodeHealth(StrEnum):
    STARTING = "starting"
    """Started, not serving yet."""
    SERVING = "serving"
    SUSPECT = "suspect"
    """Missed heartbeats; it may come back, so it counts as capacity."""
    DEAD = "dead"
    """Silent for a full ttl, or it did not join in time."""
    LEAVING = "leaving"
    """Draining, or asked to leave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolNode:
    """One node of the pool, as far as the choice needs it."""

    name: str
    node_type: str | None
    """None: it joined by itself, and cannot be retired from here."""
    health: NodeHealth
    gpus: int = 1
    cost_per_hour: float = 0.0
    tokens_per_s: float | None = None
    """Accepted ones; None: not measured for a full window."""

    @property
    def counts(self) -> bool:
        return self.health not in (NodeHealth.DEAD, NodeHealth.LEAVING)


class RetireReason(StrEnum):
    DEAD = "dead"
    """Replaced, or it would go on costing money."""
    SUSPECT = "suspect"
    NOT_SERVING = "not_serving"
    """Surplus, and it has not begun to work."""
    SLOW = "slow"
    """Surplus, and it gives the fewest tokens for its cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    name: str
    reason: RetireReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePlan:
    """What to do now."""

    start: tuple[str, ...] = ()
    """Types of the nodes to start, in order."""
    retire: tuple[Retirement, ...] = ()
    missing_gpus: int = 0
    """Wanted, but no type may start more nodes."""


def plan(
    wanted_gpus: int,
    nodes: Sequence[PoolNode],
    node_types: Iterable[NodeType],
    *,
    blocked: Iterable[str] = (),
) -> ScalePlan:
    """Bring the pool to this size. `blocked`: types whose last starts failed."""
    dead = [
        Retirement(name=node.name, reason=RetireReason.DEAD)
        for node in nodes
        if node.health is NodeHealth.DEAD and node.node_type is not None
    ]
    lacking = wanted_gpus - sum(node.gpus for node in nodes if node.counts)
    if lacking > 0:
        present = Counter(node.node_type for node in nodes if node.counts)
        usable = [one for one in node_types if one.name not in {*blocked}]
        start, missing = _choose_starts(lacking, usable, present)
        return ScalePlan(start=start, retire=tuple(dead), missing_gpus=missing)
    return ScalePlan(retire=(*dead, *_choose_retired(-lacking, nodes)))


def _choose_starts(
    lacking: int, node_types: Sequence[NodeType], present: Mapping[str | None, int]
) -> tuple[tuple[str, ...], int]:
    """Types that fit into what is lacking, by rank; for the rest, the smallest that has room."""
    chosen: Counter[str] = Counter()

    def has_room(one: NodeType) -> bool:
        number = present.get(one.name, 0) + chosen[one.name]
        return one.max_nodes is None or number < one.max_nodes

    start: list[str] = []
    ranked = sorted(node_types, key=lambda one: one.rank)
    while lacking > 0:
        roomy = [one for one in ranked if has_room(one)]
        fitting = [one for one in roomy if one.gpus <= lacking]
        found = next(iter(fitting or sorted(roomy, key=lambda one: one.gpus)), None)
        if found is None:
            break
        start.append(found.name)
        chosen[found.name] += 1
        lacking -= found.gpus
    return tuple(start), max(0, lacking)


def _choose_retired(surplus: int, nodes: Sequence[PoolNode]) -> Iterator[Retirement]:
    """Suspect nodes, then those not serving yet, then the slowest for their cost; never below the
    wanted size."""
    ours = [node for node in nodes if node.counts and node.node_type is not None]
    for node in sorted(ours, key=_retire_rank):
        if node.gpus <= surplus:
            surplus -= node.gpus
            yield Retirement(name=node.name, reason=_REASONS[node.health])


_REASONS = {
    NodeHealth.SUSPECT: RetireReason.SUSPECT,
    NodeHealth.STARTING: RetireReason.NOT_SERVING,
    NodeHealth.SERVING: RetireReason.SLOW,
}
_ORDER = (NodeHealth.SUSPECT, NodeHealth.STARTING, NodeHealth.SERVING)


def _retire_rank(node: PoolNode) -> tuple[int, float, float]:
    """Of two nodes of one speed the more expensive goes; a node not yet measured goes last."""
    if node.tokens_per_s is None:
        return _ORDER.index(node.health), float("inf"), -node.cost_per_hour
    efficiency = node.tokens_per_s / (node.cost_per_hour or float(node.gpus))
    return _ORDER.index(node.health), efficiency, -node.cost_per_hour


def wanted_after(
    wanted_gpus: int | None, *, target_gpus: int, is_action: bool, mode: ScaleMode
) -> int | None:
    """The wanted size after the rule decided; None: as started. In `recommend` only an operator
    changes it."""
    return target_gpus if is_action and mode is ScaleMode.ACT else wanted_gpus
