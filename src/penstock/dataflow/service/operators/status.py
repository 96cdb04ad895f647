# SPDX-License-Identifier: Apache-2.0
"""The run's state for operators: status, waits, and Prometheus metrics. Read-only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.groups import Node
from penstock.dataflow.explain.starvation import is_starving, starvation
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.operators.messages import (
    NodeStatus,
    PartitionStatus,
    PolicyStatus,
    Status,
    WaitStatus,
)
from penstock.types import NodeId

TRAINER_SILENT_S = 15.0
"""Report a trainer after this time without a request."""


def status(service: DataflowService, run: str) -> Status:
    now = service.process.clock()
    remote = service.partitions.status(now)
    return Status(
        run=run,
        uptime_s=now - service.process.started_at,
        finished=service.coordinator.is_finished,
        policies=tuple(
            _policy(service, consumer) for consumer in service.coordinator.consumers.values()
        ),
        nodes=tuple(_nodes(service, now)),
        waiting=tuple(_waiting(service, now)),
        trajectories=service.nodes.trajectories + sum(p.figures.trajectories for p in remote),
        sampled_tokens=service.nodes.sampled_tokens + sum(p.figures.sampled_tokens for p in remote),
        wasted_tokens=_wasted(service, remote),
        tokens_per_s=service.nodes.tokens_per_s(now) + sum(p.figures.tokens_per_s for p in remote),
        salvaged_tokens=service.nodes.turns.salvaged_tokens
        + sum(p.figures.salvaged_tokens for p in remote),
        partitions=remote,
        detail={"failing_rules": dict(errors)}
        if (errors := service.coordinator.rules.errors)
        else {},
        alarms=tuple(
            starvation(consumer, service.process.ledger.tables)
            for consumer in service.coordinator.consumers.values()
            if is_starving(consumer, service.coordinator)
        ),
    )


def _wasted(service: DataflowService, remote: Sequence[PartitionStatus]) -> dict[str, int]:
    failed = service.nodes.failed_tokens + sum(p.figures.failed_tokens for p in remote)
    return {**service.coordinator.waste.tokens, **({"failed": failed} if failed else {})}


def _policy(service: DataflowService, consumer: Consumer) -> PolicyStatus:
    lineage, batch = consumer.lineage, consumer.newest_batch
    commit = lineage.last_commit
    return PolicyStatus(
        policy=lineage.policy,
        incarnation=lineage.incarnation,
        number=lineage.number,
        steps=consumer.terms.steps,
        published=lineage.published,
        issued=consumer.num_undecided,
        ready=consumer.num_admitted,
        sealed=len(consumer.sealed),
        room=max(0, int(consumer.room())),
        reward_mean=None if batch is None else batch.reward_mean,
        staleness_mean=None if batch is None else batch.staleness_mean,
        staleness_max=None if batch is None else batch.staleness_max,
        stats={} if commit is None else msgspec.json.decode(commit.stats, type=dict[str, float]),
    )


def _nodes(service: DataflowService, now: float) -> Iterator[NodeStatus]:
    for node_id, node in service.partition.nodes.items():
        yield NodeStatus(
            node_id=node_id,
            state=_state(node),
            live=node.live,
            num_leases=node.num_leases,
            capacity=node.record.capacity,
            silent_s=round(max(0.0, now - node.last_seen), 1),
            delivered=node.num_delivered,
        )


def _state(node: Node) -> str:
    if node.is_expired:
        return "silent"
    return "quarantined" if node.is_quarantined else node.state.value


def _waiting(service: DataflowService, now: float) -> Iterator[WaitStatus]:
    """Name, for every wait, the party that must act next."""
    coordinator = service.coordinator
    nodes = service.partition.nodes
    for (who, on), since in service.process.waiting_since.items():
        if on == "work" and not service.process.has_room:
            on = "free memory or disk space; see the storage limits in the config"
            yield WaitStatus(who=who, on=on, since_s=round(now - since, 1))
        elif on == "batch":
            yield WaitStatus(who=who, on=_batch_blocker(service), since_s=round(now - since, 1))
        elif (node := nodes.get(NodeId(who))) is not None and node.is_quarantined:
            on = "the end of its quarantine: check its engine, then restart it"
            yield WaitStatus(who=who, on=on, since_s=round(now - since, 1))
        elif service.partition.num_waiting:
            yield WaitStatus(who=who, on="a newer version to load", since_s=round(now - since, 1))
        else:
            policy = next(iter(coordinator.consumers))
            yield WaitStatus(
                who=who, on=f"trainer {policy} to commit", since_s=round(now - since, 1)
            )
    if service.source_error:
        yield WaitStatus(who="dataflow", on=f"a source: {service.source_error}", since_s=0.0)
    for policy, consumer in coordinator.consumers.items():
        seen = service.trainers.seen.get(policy, service.process.started_at)
        if not consumer.has_trained_all and now - seen > TRAINER_SILENT_S:
            yield WaitStatus(who="dataflow", on=f"trainer {policy}", since_s=round(now - seen, 1))
    if not any(node.state == "live" and not node.is_expired for node in nodes.values()):
        since_s = round(now - _last_live_at(service), 1)
        yield WaitStatus(who="dataflow", on="a live rollout node", since_s=since_s)


def _last_live_at(service: DataflowService) -> float:
    """When a node was last known to be live: its last delivery or heartbeat."""
    silent = [node.last_seen for node in service.partition.nodes.values() if node.state == "live"]
    delivered = [service.nodes.tokens_seen[-1][0]] if service.nodes.tokens_seen else []
    return max([service.process.started_at, *silent, *delivered])


def _batch_blocker(service: DataflowService) -> str:
    holding = [n for n, node in service.partition.nodes.items() if node.num_leases]
    if holding:
        return f"{len(service.coordinator.open)} groups on {', '.join(sorted(holding)[:3])}"
    if service.partition.num_waiting:
        return "a node to take work"
    return "work to be issued"


class _Collector:
    def __init__(self, service: DataflowService, run: str) -> None:
        self._service = service
        self._run = run

    def collect(self) -> Iterator[Metric]:
        now = status(self._service, self._run)
        plain = {
            "penstock_trajectories_stored": now.trajectories,
            "penstock_sampled_tokens": now.sampled_tokens,
            "penstock_tokens_per_second": now.tokens_per_s,
            "penstock_nodes": len(now.nodes),
        }
        for name, value in plain.items():
            yield GaugeMetricFamily(name, name.replace("_", " "), value)
        depth = GaugeMetricFamily("penstock_queue_depth", "groups", labels=["policy", "state"])
        version = GaugeMetricFamily("penstock_weight_version", "committed", labels=["policy"])
        for policy in now.policies:
            for state in ("issued", "ready", "sealed"):
                depth.add_metric([policy.policy, state], getattr(policy, state))
            version.add_metric([policy.policy], policy.number)
        wasted = GaugeMetricFamily("penstock_wasted_tokens", "never trained", labels=["reason"])
        for reason, tokens in now.wasted_tokens.items():
            wasted.add_metric([reason], tokens)
        yield from (depth, version, wasted)


def metrics(service: DataflowService, run: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service, run))
    return generate_latest(registry)
