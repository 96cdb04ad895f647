# SPDX-License-Identifier: Apache-2.0
"""`penstock plan capacity` against the arithmetic that docs/explanation/growth.md prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.unit.cli.test_commands import run_main

from penstock.fleet.capacity import Workload, plan_capacity

PAGE = (Path(__file__).parents[3] / "docs" / "explanation" / "growth.md").read_text()
SIZES = (10_000, 100_000)
SHORT = 500
SCALES = {"million": 1e6, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def row(label: str) -> list[float]:
    """The last number of each cell of the row that begins so, for both sizes."""
    [line] = [line for line in PAGE.splitlines() if line.startswith(f"| {label}")]
    cells = line.split("|")[2:4]
    return [_number(cell) for cell in cells]


def _number(cell: str) -> float:
    found = re.findall(r"([\d.,]+)\W*(million|MB|GB|TB)?", cell.replace("*", ""))
    text, unit = found[-1]
    return float(text.replace(",", "").rstrip(".")) * SCALES.get(unit, 1.0)


@pytest.mark.parametrize(
    ("label", "tokens", "figure"),
    [
        ("tokens per second", 8000, "tokens_per_s"),
        ("trajectories per second, 8,000", 8000, "trajectories_per_s"),
        ("trajectories per second, 500", SHORT, "trajectories_per_s"),
        ("payload", 8000, "payload_bytes_per_s"),
        ("partitions, long", 8000, "partitions"),
        ("partitions, short", SHORT, "partitions"),
        ("node processes", 8000, "nodes"),
        ("heartbeats per second", 8000, "heartbeats_per_s"),
        ("deltas to every node", 8000, "fan_out_bytes"),
        ("from one origin", 8000, "origin_s"),
        ("relays", 8000, "relays"),
        ("cost per hour", 8000, "cost_per_hour"),
    ],
)
def test_the_page_and_the_command_agree(label: str, tokens: int, figure: str) -> None:
    plans = [plan_capacity(Workload(gpus=gpus, trajectory_tokens=tokens)) for gpus in SIZES]
    assert [getattr(plan, figure) for plan in plans] == pytest.approx(row(label), rel=0.015)


def test_what_breaks_first() -> None:
    """As the page says: nothing of the service at 10,000; the origin, then heartbeats at 100,000;
    with short trajectories the coordinator too."""
    small, large = (plan_capacity(Workload(gpus=gpus)) for gpus in SIZES)
    assert all(one.load < 0.2 for one in small.limits)
    assert ["without relays" in large.limits[0].what, "heartbeats" in large.limits[1].what] == [
        True,
        True,
    ]
    assert [one.load > 1 for one in large.limits] == [True, True, False]
    short = plan_capacity(Workload(gpus=100_000, trajectory_tokens=SHORT))
    assert all(one.load > 1 for one in short.limits)
    patient = plan_capacity(Workload(gpus=100_000, ttl_s=120.0))
    assert patient.heartbeats_per_s == pytest.approx(small.heartbeats_per_s, rel=0.01)
    for limit in large.limits:
        at_limit = plan_capacity(Workload(gpus=limit.at_gpus))
        [again] = [one for one in at_limit.limits if one.what == limit.what]
        assert again.load == pytest.approx(1.0, rel=0.01)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_main(capsys, "plan", "capacity", "--gpus", "10000")
    assert code == 0
    for text in ("2 partitions; 30 relays", "938 nodes", "what breaks", "no run of this size"):
        assert text in out
    code, out, _ = run_main(capsys, "plan", "capacity", "--gpus", "10000", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["partitions"] == 2
    code, _, err = run_main(capsys, "plan", "capacity", "--gpus", "1")
    assert code == 1 and "at least one for rollout" in err
