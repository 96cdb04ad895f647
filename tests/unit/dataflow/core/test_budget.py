# SPDX-License-Identifier: Apache-2.0
"""What a run has used, over restarts of whoever counts, and when its budget is spent."""

from __future__ import annotations

import pytest

from penstock.dataflow.core.budget import MAX_GAP_S, Usage, UsageMeter, spent


def test_tokens_are_counted_once_over_restarts() -> None:
    meter = UsageMeter(Usage(tokens=100))  # by an earlier launcher
    for now, tokens in enumerate((110, 130, 125, 127)):  # a partition started again after 130
        meter.observe(float(now), tokens=tokens, num_nodes=0)
    assert meter.usage.tokens == 132


def test_node_hours_are_live_nodes_times_hours() -> None:
    meter = UsageMeter(Usage(node_s=3600.0))
    for now in range(0, 3601, 10):
        meter.observe(float(now), tokens=0, num_nodes=2 if now <= 1800 else 1)
    assert meter.usage.node_hours == pytest.approx(2.5)


def test_a_gap_that_nobody_observed_is_not_counted_in_full() -> None:
    meter = UsageMeter(Usage())
    meter.observe(0.0, tokens=0, num_nodes=1)
    meter.observe(1e6, tokens=0, num_nodes=1)
    assert meter.usage.node_s == MAX_GAP_S


def test_a_budget_is_spent_when_it_is_reached_and_says_how_to_go_on() -> None:
    used = Usage(tokens=1000, node_s=7200.0)
    assert spent(used, tokens=None, node_hours=None) == ""
    assert spent(used, tokens=1001, node_hours=2.1) == ""
    assert "raise budget.tokens" in spent(used, tokens=1000, node_hours=None)
    assert "raise budget.node_hours" in spent(used, tokens=1001, node_hours=2.0)
