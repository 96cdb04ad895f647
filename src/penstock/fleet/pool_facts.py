# SPDX-License-Identifier: Apache-2.0
"""The nodes of a pool for the autoscaler, from the balance report and from what was started here.

Pure: reads no clock and no file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.dataflow.report.shape import BalanceReport, NodeReport
from penstock.fleet.autoscaler import NodeHealth, NodeType, PoolNode

DRAINING = "draining"
STARTING = "starting"


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedNode:
    """A node that was started from here."""

    node_type: str
    started_at: float
    """When it was last started, by the clock of the report."""
    is_restarted: bool = False
    """Whether its launcher starts it again when it exits."""
    is_leaving: bool = False


def pool_nodes(
    report: BalanceReport,
    started: Mapping[str, StartedNode],
    node_types: Mapping[str, NodeType],
    *,
    start_timeout_s: float,
) -> Iterator[PoolNode]:
    """Every node of the report that is not gone for good, and every node on its way to it."""
    reported = {str(node.node_id): node for node in report.nodes}
    for name, node in reported.items():
        own = started.get(name)
        if own is None and node.status == "gone":
            continue
        yield _pool_node(name, node, own, report, node_types, start_timeout_s)
    for name, own in started.items():
        if name not in reported:
            yield _pool_node(name, None, own, report, node_types, start_timeout_s)


def _pool_node(
    name: str,
    node: NodeReport | None,
    own: StartedNode | None,
    report: BalanceReport,
    node_types: Mapping[str, NodeType],
    start_timeout_s: float,
) -> PoolNode:
    of_type = node_types.get(own.node_type) if own is not None else None
    gpus = of_type.gpus if of_type is not None else node.gpus if node is not None else 1
    cost = 0.0 if node is None else node.cost_per_hour
    return PoolNode(
        name=name,
        node_type=None if own is None else own.node_type,
        health=_health(node, own, report.at, start_timeout_s),
        gpus=gpus,
        cost_per_hour=cost if of_type is None else of_type.cost_per_hour,
        tokens_per_s=None if node is None else _tokens_per_s(node, report),
    )


def _health(
    node: NodeReport | None, own: StartedNode | None, now: float, start_timeout_s: float
) -> NodeHealth:
    if own is not None and own.is_leaving:
        return NodeHealth.LEAVING
    may_start = own is not None and now - own.started_at < start_timeout_s
    if node is None:
        return NodeHealth.STARTING if may_start else NodeHealth.DEAD
    if node.status == "gone":
        is_coming_back = may_start and own is not None and own.is_restarted
        return NodeHealth.STARTING if is_coming_back else NodeHealth.DEAD
    if node.activity == DRAINING:
        return NodeHealth.LEAVING
    if node.activity == STARTING:
        return NodeHealth.STARTING
    return NodeHealth.SUSPECT if node.status == "suspect" else NodeHealth.SERVING


def _tokens_per_s(node: NodeReport, report: BalanceReport) -> float | None:
    """None for a node that was not there for the whole window."""
    window = report.window
    since_joined_s = node.time.total_s - (report.at - window.closed_at)
    if not window.complete or since_joined_s < window.wall_s or not window.wall_s:
        return None
    return node.accepted.tokens / window.wall_s
