# SPDX-License-Identifier: Apache-2.0
"""The screen of `penstock top`: it fits any terminal, and what needs a look comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from rich.console import Console
from tests.unit.cli.sample_statuses import policy_status, status, view

from penstock.cli.main import COMMANDS, build
from penstock.cli.top_screen import NodeRates, block_chart, draw
from penstock.dataflow.service.operators.messages import Status, WaitStatus
from penstock.runs.bottleneck import bottleneck
from penstock.runs.monitor import RunView
from penstock.types import NodeId, PolicyName


def drawn(seen: RunView, width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, force_terminal=False)
    with console.capture() as capture:
        console.print(draw(seen, {"node-1": 2.5}, width, height))
    return capture.get().splitlines()


def fleet(num_nodes: int) -> Status:
    now = status()
    nodes = [
        replace(now.nodes[0], node_id=NodeId(f"node-{number}")) for number in range(num_nodes - 1)
    ]
    lost = replace(now.nodes[0], node_id=NodeId("zzz"), state="silent", silent_s=99.0)
    return replace(now, nodes=(*nodes, lost))


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (60, 14)])
@pytest.mark.parametrize("num_nodes", [1, 3, 400])
@pytest.mark.parametrize("num_policies", [1, 12])
def test_it_fits_the_terminal(width: int, height: int, num_nodes: int, num_policies: int) -> None:
    policies = [
        replace(policy_status(), policy=PolicyName(f"p{number}")) for number in range(num_policies)
    ]
    seen = view(replace(fleet(num_nodes), policies=tuple(policies)))
    curves = {"p0": [number / 50 for number in range(50)]}
    lines = drawn(replace(seen, curves=curves, note="node-0: " + "long " * 99), width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert "node-0: long" in lines[-1]


def test_it_shows_flow_curve_and_fleet() -> None:
    text = "\n".join(drawn(view(fleet(3))))
    for expected in (
        "reverse · 0:42 · about 1:01 left",
        "nodes ◀ slowest",
        "2 of 3 live",
        "300/768 slots",
        "2,145 tok/s",
        "5.0% waste",
        "served v3",
        "step 3/10",
        "0.500",
        "█",
        "3,072",
        "2.5",
        "trainer policy waits for 4 groups on node-0, 12 s",
    ):
        assert expected in text


def test_a_node_that_needs_a_look_comes_first() -> None:
    lines = drawn(view(fleet(400)))
    first = next(number for number, line in enumerate(lines) if line.startswith("node  ")) + 1
    assert lines[first].startswith("zzz") and "silent for 99 s" in lines[first]
    assert any(line.startswith("… and 39") for line in lines)


def test_who_is_slowest() -> None:
    now = status()
    idle = (WaitStatus(who="node-0", on="work", since_s=1.0),)
    assert bottleneck(now) == "nodes"
    assert bottleneck(replace(now, waiting=idle)) == "step"
    assert bottleneck(replace(now, waiting=())) == bottleneck(replace(now, finished=True)) == ""
    assert bottleneck(replace(now, waiting=(*now.waiting, *idle))) == "", "both wait for a while"


def test_the_rate_of_a_node_is_of_the_last_seconds() -> None:
    rates, now = NodeRates(window_s=10.0), status()
    node, found = now.nodes[0], dict[str, float]()
    for second in range(60):
        delivered = 1000 + 2 * second + 3 * max(0, second - 40)
        found = rates.add(replace(now, nodes=(replace(node, delivered=delivered),)), float(second))
    assert found == {"node-0": 5.0}
    assert rates.add(replace(now, nodes=(replace(node, delivered=7),)), 60.0) == {"node-0": 0.0}
    assert rates.add(replace(now, nodes=()), 61.0) == {}


def test_a_chart_of_blocks() -> None:
    assert block_chart([0.0, 1.0], 10, 2) == [" █", "▁█"]
    assert block_chart([0.5] * 3, 2, 1) == ["▁▁"]
    assert len(block_chart([float(number) for number in range(999)], 40, 3)[0]) == 40


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_command_can_be_completed(shell: Literal["bash", "zsh", "fish"]) -> None:
    script = build().generate_completion(shell=shell)
    assert all(name in script for name, _, _ in COMMANDS)
    assert "install-completion" in script
