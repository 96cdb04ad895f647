# SPDX-License-Identifier: Apache-2.0
"""Prometheus metrics of the dataflow service, and through it of nodes and trainers, which listen on
no port. Measures nothing: every figure is counted anyway, and read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from penstock.dataflow.core.groups import Node
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.operators.messages import Status
from penstock.dataflow.service.operators.status import status
from penstock.dataflow.service.partition import PartitionService
from penstock.observe.metric_names import PROMETHEUS
from penstock.types import NodeId, PolicyName


def prometheus_text(service: DataflowService, run: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(service, run))
    return generate_latest(registry)


def partition_prometheus_text(service: PartitionService) -> bytes:
    """Of an additional partition: what it stored, and its nodes, which the coordinator does not
    know one by one."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_PartitionCollector(service))
    return generate_latest(registry)


class _PartitionCollector:
    def __init__(self, service: PartitionService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        found, index = self._service.figures(), str(self._service.partition.index)
        stored = _counter("penstock_partition_trajectories_stored")
        stored.add_metric([index], found.trajectories)
        tokens = _counter("penstock_partition_sampled_tokens")
        tokens.add_metric([index], found.sampled_tokens)
        groups = _gauge("penstock_partition_open_groups")
        groups.add_metric([index], found.num_open)
        yield from (stored, tokens, groups)
        yield from _node_metrics(self._service.partition.nodes, self._service.process.clock())


class _Collector:
    def __init__(self, service: DataflowService, run: str) -> None:
        self._service = service
        self._run = run

    def collect(self) -> Iterator[Metric]:
        now = status(self._service, self._run)
        yield _counter("penstock_trajectories_stored", now.trajectories)
        yield _counter("penstock_sampled_tokens", now.sampled_tokens)
        yield _gauge("penstock_tokens_per_second", now.tokens_per_s)
        yield _gauge("penstock_nodes", len(now.nodes))
        wasted = _counter("penstock_wasted_tokens")
        for reason, tokens in now.wasted_tokens.items():
            wasted.add_metric([reason], tokens)
        yield wasted
        yield from _policy_metrics(now)
        service, published = self._service, {one.policy: one.published for one in now.policies}
        yield from _node_metrics(service.partition.nodes, service.process.clock())
        yield _versions_behind(now, published)
        yield from self._histograms()
        yield from _part_metrics(now)
        yield from _check_metrics(now)

    def _histograms(self) -> Iterator[Metric]:
        rewards, ages = _histogram("penstock_reward"), _histogram("penstock_staleness")
        for policy, consumer in self._service.coordinator.consumers.items():
            found = consumer.sealed_rewards
            rewards.add_metric([policy], buckets=found.buckets(), sum_value=found.total)
            found = consumer.sealed_ages
            ages.add_metric([policy], buckets=found.buckets(), sum_value=found.total)
        yield from (rewards, ages)


def _node_metrics(nodes: Mapping[NodeId, Node], now: float) -> Iterator[Metric]:
    tokens = _counter("penstock_node_tokens")
    leases, silent = _gauge("penstock_node_leases"), _gauge("penstock_node_silent_seconds")
    for node_id, node in nodes.items():
        tokens.add_metric([node_id], node.num_tokens)
        leases.add_metric([node_id], node.num_leases)
        silent.add_metric([node_id], round(max(0.0, now - node.last_seen), 1))
    yield from (tokens, leases, silent)


def _versions_behind(now: Status, published: Mapping[PolicyName, int]) -> Metric:
    behind = _gauge("penstock_node_versions_behind")
    for node in now.nodes:
        for live in node.live:
            missing = max(0, published.get(live.policy, live.number) - live.number)
            behind.add_metric([node.node_id, live.policy], missing)
    return behind


def _gauge(name: str, value: float | None = None) -> GaugeMetricFamily:
    """A gauge with its help text and labels; without a value, its samples are added later."""
    metric = PROMETHEUS[name]
    return GaugeMetricFamily(name, metric.meaning, value, metric.labels or None)


def _counter(name: str, value: float | None = None) -> CounterMetricFamily:
    metric = PROMETHEUS[name]
    return CounterMetricFamily(name, metric.meaning, value, metric.labels or None)


def _histogram(name: str) -> HistogramMetricFamily:
    metric = PROMETHEUS[name]
    return HistogramMetricFamily(name, metric.meaning, labels=metric.labels)


def _policy_metrics(now: Status) -> Iterator[Metric]:
    depth, version = _gauge("penstock_queue_depth"), _gauge("penstock_weight_version")
    training, skipped = _gauge("penstock_training"), _gauge("penstock_skipped_batches")
    for policy in now.policies:
        for state in ("issued", "ready", "sealed"):
            depth.add_metric([policy.policy, state], getattr(policy, state))
        version.add_metric([policy.policy], policy.number)
        skipped.add_metric([policy.policy], policy.skipped)
        for name, value in policy.stats.items():
            training.add_metric([policy.policy, name], value)
    yield from (depth, version, training, skipped)


def _part_metrics(now: Status) -> Iterator[Metric]:
    rewards, tokens = _gauge("penstock_role_reward"), _gauge("penstock_role_tokens")
    dropped, lag = _gauge("penstock_role_dropped_groups"), _gauge("penstock_partner_lag_rows")
    for policy in now.policies:
        for part in policy.parts:
            labels = [policy.policy, part.role, part.source]
            tokens.add_metric(labels, part.tokens)
            if part.reward_mean is not None:
                rewards.add_metric(labels, part.reward_mean)
            for reason, number in part.dropped.items():
                dropped.add_metric([*labels, reason], number)
        for partner, ages in policy.partner_lag.items():
            for age, number in ages.items():
                lag.add_metric([policy.policy, partner, age], number)
    yield from (rewards, tokens, dropped, lag)


def _check_metrics(now: Status) -> Iterator[Metric]:
    rows, tokens = _gauge("penstock_checked_rows"), _gauge("penstock_checked_tokens")
    seconds = _gauge("penstock_checked_seconds")
    for subject, counts in now.checks.items():
        rows.add_metric([subject, "all"], counts.num_checked)
        rows.add_metric([subject, "different"], counts.num_different)
        tokens.add_metric([subject], counts.num_tokens)
        seconds.add_metric([subject], counts.seconds)
    yield from (rows, tokens, seconds)
