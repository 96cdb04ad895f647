# SPDX-License-Identifier: Apache-2.0
"""What Prometheus gets of a service that trained: counters, histograms, figures of nodes and steps;
and that each query of the Grafana dashboard asks for something that is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from tests.contract.dataflow_server import POLICY
from tests.contract.test_dataflow_service import start
from tests.contract.test_status import train, trainable

from penstock.dataflow.core.histograms import Histogram
from penstock.dataflow.records import BatchRecord
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.operators.prometheus import prometheus_text
from penstock.dataflow.service.trainers.messages import CommitRequest
from penstock.observe.metric_names import PROMETHEUS

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "penstock.json"
ELSEWHERE = ("penstock_weights_", "penstock_info", "penstock_partition_", "penstock_gateway_")
"""Metrics of weight servers, additional partitions and gateways."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
Samples = dict[str, list[tuple[dict[str, str], float]]]


def scrape(service: DataflowService) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(prometheus_text(service, "r").decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


async def trained(folder: Path) -> DataflowService:
    service = build(trainable(), folder)
    await start(service)
    await train(service, 1, 1)
    await train(service, 2, 2)
    stats = {"loss": 0.5, "reward/mean": 0.25}
    commit = CommitRequest(incarnation=1, number=2, skipped="", stats=stats)
    await service.trainers.commit(POLICY, 2, commit)  # a repeated commit changes nothing
    return service


async def test_a_scrape_has_what_the_ledger_has(tmp_path: Path) -> None:
    service = await trained(tmp_path)
    found = scrape(service)
    rows = service.nodes.trajectories
    assert rows > 0 and found["penstock_trajectories_stored_total"] == [({}, rows)]
    assert found["penstock_node_tokens_total"][0][1] == service.nodes.sampled_tokens > 0
    sealed = sum(one.num_rows for one in service.process.ledger.tables.read(BatchRecord))
    assert ({"policy": POLICY, "le": "+Inf"}, sealed) in found["penstock_reward_bucket"]
    buckets = {label["le"]: value for label, value in found["penstock_staleness_bucket"]}
    assert buckets["+Inf"] == sealed > 0 and list(buckets.values()) == sorted(buckets.values())
    mean = found["penstock_staleness_sum"][0][1] / sealed
    newest = service.coordinator.consumers[POLICY].newest_batch
    assert newest is not None and newest.staleness_mean == 1.0
    assert mean == 0.5, "the first batch was fresh, the second one version old"
    service.close()


async def test_every_metric_of_the_table_is_served(tmp_path: Path) -> None:
    service = await trained(tmp_path)
    text = prometheus_text(service, "r").decode()
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.M))
    for name, metric in PROMETHEUS.items():
        if not name.startswith(ELSEWHERE):
            shown = f"{name}_total" if metric.kind == "counter" else name
            assert kinds[shown] == metric.kind, name
    service.close()


def queries(dashboard: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_each_query_of_the_dashboard_names_a_metric_that_exists() -> None:
    served = {
        f"{name}{suffix}" for name, metric in PROMETHEUS.items() for suffix in SUFFIXES[metric.kind]
    }
    found = queries(json.loads(DASHBOARD.read_text()))
    assert len(found) >= 15
    for query in found:
        names = re.findall(r"penstock_\w+", query)
        assert names and set(names) <= served, query
        labels = {label for name in names for label in _labels(name)} | {"job", "le", "instance"}
        assert set(re.findall(r"(\w+)=~?\"", query)) <= labels, query


def _labels(name: str) -> tuple[str, ...]:
    return next(m.labels for n, m in PROMETHEUS.items() if re.fullmatch(rf"{n}(_[a-z]+)?", name))


def test_a_value_on_a_bound_counts_below_it() -> None:
    histogram = Histogram((0.0, 1.0))
    for value in (0.0, 0.5, 1.0, 7.0):
        histogram.add(value)
    assert histogram.buckets() == [("0", 1.0), ("1", 3.0), ("+Inf", 4.0)]
    assert histogram.total == 8.5
