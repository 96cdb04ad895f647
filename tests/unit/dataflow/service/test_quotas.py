# SPDX-License-Identifier: Apache-2.0
"""Quotas of one credential: what a whole fleet may do at once."""

from __future__ import annotations

import pytest

from penstock.dataflow.core.leasing import RegisterRequest
from penstock.dataflow.core.node_registry import NodeRegistry
from penstock.dataflow.service.nodes.quotas import MAX_OWED, RELEASES_PER_S, NodeQuotas
from penstock.errors import Busy
from penstock.types import NodeId

CAPACITY = 512


def test_a_fleet_that_was_preempted_as_a_whole_is_served_again_soon() -> None:
    now = 0.0
    registry = NodeRegistry(lambda record: None)
    quotas = NodeQuotas(registry, lambda: now, lambda _: False)
    fleet = [NodeId(f"spot.{number}") for number in range(100)]

    def join(node_id: NodeId) -> None:
        body = RegisterRequest(node_id=node_id, boot_id="b", capacity=CAPACITY, policies=())
        registry.register(body, now)
        quotas.check_released(node_id)

    for node_id in fleet:
        join(node_id)
    for node_id in fleet:
        registry.num_released["spot"] += CAPACITY
        registry.remove(registry.nodes[node_id], now)
    with pytest.raises(Busy, match="hands back too many slots"):
        join(fleet[0])
    now += MAX_OWED / RELEASES_PER_S
    for node_id in fleet:
        join(node_id)
