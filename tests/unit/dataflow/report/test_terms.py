# SPDX-License-Identifier: Apache-2.0
"""From the config section to the terms of the rule, and from tags to GPUs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from pydantic import ValidationError

from penstock.config.dataflow import ReportConfig
from penstock.dataflow.core.groups import Node
from penstock.dataflow.core.leasing import LiveVersion, NodeState
from penstock.dataflow.records import NodeRecord
from penstock.dataflow.report.figures import BalanceSettings, NodeActivity
from penstock.dataflow.service.operators.observe import (
    activity_of,
    balance_settings,
    observe_nodes,
)
from penstock.types import NodeId, PolicyName, PublishedVersion

P = PolicyName("p")
WANTED = {P: PublishedVersion(policy=P, incarnation=1, number=5, manifest_digest="")}


def test_the_defaults_of_config_and_rule_are_the_same() -> None:
    assert balance_settings(ReportConfig(), ttl_s=12.0) == BalanceSettings()


def test_every_setting_arrives() -> None:
    config = ReportConfig(
        tau_low=0.01,
        tau_high=0.3,
        rho=1.5,
        window=4,
        min_gpus=2,
        max_gpus=9,
        node_start_s=77.0,
    )
    terms = BalanceSettings(
        tau_low=0.01,
        tau_high=0.3,
        rho=1.5,
        window_versions=4,
        min_gpus=2,
        max_gpus=9,
        node_start_s=77.0,
        suspect_s=10.0,
    )
    assert balance_settings(config, ttl_s=20.0) == terms


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"tau_low": 0.1}, "tau_low < tau_high"),
        ({"min_gpus": 4, "max_gpus": 3}, "max_gpus >= min_gpus"),
        ({"rho": 0.9}, "greater than or equal to 1"),
        ({"window": 0}, "greater than 0"),
        ({"tau_high": 1.0}, "less than 1"),
    ],
)
def test_invalid_settings_are_rejected(given: dict[str, float], fix: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ReportConfig.model_validate(given)
    assert fix in str(refused.value)


def node(*tags: str, state: NodeState = NodeState.LIVE, number: int = 5) -> Node:
    record = NodeRecord(
        node_id=NodeId("n"),
        boot_id="s",
        capacity=4,
        policies="[]",
        tags=msgspec.json.encode(tags).decode(),
        left=False,
        at=0.0,
    )
    live = (LiveVersion(policy=P, incarnation=1, number=number),)
    return Node(record=record, last_seen=0.0, state=state, live=live)


@pytest.mark.parametrize(
    ("tags", "gpus", "cost"),
    [
        ((), 1, 0.0),
        (("gpus=8", "cost=12.5", "eu"), 8, 12.5),
        (("gpus=0", "cost=-1"), 1, 0.0),
        (("gpus=many", "cost=nan"), 1, 0.0),
        (("gpus=0.5",), 1, 0.0),
        (("gpus=", "=3", "cost=inf"), 1, 0.0),
    ],
)
def test_tags_set_gpus_and_cost(tags: tuple[str, ...], gpus: int, cost: float) -> None:
    [look] = observe_nodes([node(*tags)], WANTED)
    assert (look.gpus, look.cost_per_hour) == (gpus, cost)


def test_what_a_node_is_doing() -> None:
    holding = node()
    holding.num_leases = 1
    silent = replace(holding, is_expired=True)
    starting, draining = node(state=NodeState.STARTING), node(state=NodeState.DRAINING)
    assert activity_of(node(), WANTED) is NodeActivity.WAITING
    assert activity_of(node(number=4), WANTED) is NodeActivity.LOADING
    assert activity_of(node(number=4), {}) is NodeActivity.WAITING
    assert activity_of(holding, WANTED) is NodeActivity.ROLLING_OUT
    assert activity_of(silent, WANTED) is NodeActivity.SILENT
    assert activity_of(starting, WANTED) is NodeActivity.STARTING
    assert activity_of(draining, WANTED) is NodeActivity.DRAINING
