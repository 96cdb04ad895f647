# SPDX-License-Identifier: Apache-2.0
"""Reads the dataflow service's state for the balance report; the only module that knows both.

Reads the state of coordinator, partitions and nodes; changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from penstock.config.dataflow import ReportConfig
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.groups import Node
from penstock.dataflow.core.leasing import NodeState
from penstock.dataflow.core.partition_runtime import PartitionRuntime
from penstock.dataflow.ledger.assemble import CoordinatorCore
from penstock.dataflow.report.balance import (
    BalanceMonitor,
    NodeObservation,
    Observation,
    PolicyObservation,
)
from penstock.dataflow.report.figures import BalanceSettings, NodeActivity
from penstock.dataflow.service.process import Process
from penstock.types import PolicyName, PublishedVersion

_tags = msgspec.json.Decoder(tuple[str, ...])


def balance_settings(config: ReportConfig, *, ttl_s: float) -> BalanceSettings:
    """Settings from the config section. A node is suspect after two missed heartbeats, half a
    ttl."""
    settings = config.model_dump(exclude={"window"})
    return BalanceSettings(**settings, window_versions=config.window, suspect_s=ttl_s / 2)


def make_monitor(
    process: Process, core: CoordinatorCore, run: str, terms: BalanceSettings
) -> BalanceMonitor:
    """The monitor of a service; its flow counter has yet to be restored."""
    consumers = core.coordinator.consumers

    def number_of(policy: PolicyName, incarnation: int, number: int) -> int:
        return consumers[policy].lineage.effective_number(incarnation, number)

    return BalanceMonitor(run, consumers, terms, number_of, core.manifests, process.clock())


def observe_service(coordinator: Coordinator, host: PartitionRuntime) -> Observation:
    """Nodes that only evaluate are left out: training needs no more or fewer of them."""
    wanted = {version.policy: version for version in host.partition.target_versions}
    nodes = [node for node in host.partition.nodes.values() if not node.is_evaluator]
    return Observation(
        nodes=tuple(observe_nodes(nodes, wanted)),
        policies={
            policy: PolicyObservation(
                issued=consumer.num_undecided,
                ready=consumer.num_admitted,
                sealed=len(consumer.sealed),
                done=consumer.has_trained_all,
            )
            for policy, consumer in coordinator.consumers.items()
        },
        waiting_slots=host.partition.waiting.num_slots,
    )


def observe_nodes(
    nodes: Iterable[Node], wanted: Mapping[PolicyName, PublishedVersion]
) -> Iterable[NodeObservation]:
    for node in nodes:
        record = node.record
        # What a stranger says of itself must not keep own nodes from being started, or end them.
        gpus, cost_per_hour = (0, 0.0) if node.is_untrusted else _parse_tags(record.tags)
        yield NodeObservation(
            node_id=record.node_id,
            activity=activity_of(node, wanted),
            joined_at=node.joined_at,
            last_seen=node.last_seen,
            num_leases=node.num_leases,
            capacity=record.capacity,
            gpus=gpus,
            cost_per_hour=cost_per_hour,
        )


def activity_of(node: Node, wanted: Mapping[PolicyName, PublishedVersion]) -> NodeActivity:
    if node.is_expired:
        return NodeActivity.SILENT
    if node.state is NodeState.STARTING:
        return NodeActivity.STARTING
    if node.state is NodeState.DRAINING:
        return NodeActivity.DRAINING
    if node.state is NodeState.PAUSED:
        return NodeActivity.PAUSED
    if node.num_leases:
        return NodeActivity.ROLLING_OUT
    is_behind = any(
        version.policy in wanted
        and (version.incarnation, version.number)
        < (wanted[version.policy].incarnation, wanted[version.policy].number)
        for version in node.live
    )
    return NodeActivity.LOADING if is_behind else NodeActivity.WAITING


@lru_cache(maxsize=4096)
def _parse_tags(tags: str) -> tuple[int, float]:
    """GPUs and cost per hour from a node's tags; called for every node at every tick."""
    marks = dict(tag.split("=", 1) for tag in _tags.decode(tags) if "=" in tag)
    return max(1, int(_positive(marks.get("gpus"), 1.0))), _positive(marks.get("cost"), 0.0)


def _positive(text: str | None, otherwise: float) -> float:
    """Tags are free text: ignore anything but a number above 0."""
    try:
        value = float(text or "")
    except ValueError:
        return otherwise
    return value if 0 < value < 1e6 else otherwise
