# SPDX-License-Identifier: Apache-2.0
"""The benchmark of relays: it counts what leaves the origin, and can tell a relay from none."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.weights_fanout import Cell, Loopback, figures, topology, world

MB = 1 << 20


def cell(copies: float, seconds: float, near_s: float = 1.0) -> Cell:
    return Cell(copies=copies, seconds=seconds, near_s=near_s, link_s=4.0)


def test_the_worst_cell_counts_and_the_bound_is_the_slower_of_link_and_machine() -> None:
    found = figures({("relay", 1): [cell(1.0, 5.0)], ("tree", 8): [cell(1.3, 12.0, near_s=8.0)]})
    assert found["origin_egress_copies"] == 1.3
    assert found["time_vs_link_relay_1"] == 1.25 == found["time_vs_bound_relay_1"]
    assert (found["time_vs_link_tree_8"], found["time_vs_bound_tree_8"]) == (3.0, 1.5)


@pytest.mark.slow
def test_without_a_relay_each_node_costs_a_copy(tmp_path: Path) -> None:
    with world(Loopback(), tmp_path, 2 * MB) as made:
        for name, copies in (("direct", 3.0), ("relay", 1.0)):
            with topology(made, name) as relays:
                arrival = made.nodes(3, relays)
            assert arrival.egress_bytes / made.model_bytes == pytest.approx(copies, abs=0.01)
