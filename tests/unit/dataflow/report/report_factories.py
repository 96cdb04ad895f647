# SPDX-License-Identifier: Apache-2.0
"""Example figures of a run, for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.dataflow.report.figures import (
    Figures,
    Flow,
    NodeActivity,
    NodeFigures,
    PolicyFigures,
    StepTiming,
)
from penstock.dataflow.report.shape import Amount, WindowReport
from penstock.types import NodeId, PolicyName

POLICY = PolicyName("policy")


def counts(tokens: int) -> Amount:
    """Ten tokens per sequence."""
    return Amount(sequences=tokens // 10, tokens=tokens)


def flow(produced: int, entered: int, consumed: int, **wasted: int) -> Flow:
    return Flow(
        produced=counts(produced),
        entered=counts(entered),
        consumed=counts(consumed),
        wasted={why: counts(tokens) for why, tokens in wasted.items()},
    )


def policy_figures(name: str = POLICY, **changes: Any) -> PolicyFigures:
    made = PolicyFigures(
        policy=PolicyName(name),
        done=False,
        num_versions=10,
        eval_s=4.0,
        samples=(StepTiming(wait_s=1.0, step_s=10.0), StepTiming(wait_s=2.0, step_s=10.0)),
        window=flow(1000, 800, 600, stale=40, uniform_reward=150),
        total=flow(5000, 4000, 3600, stale=40, uniform_reward=900),
        staleness={0: counts(400), 1: counts(200)},
        issued=12,
        ready=3,
        sealed=1,
        account={"waiting": 30.0, "training": 70.0},
    )
    return replace(made, **changes)


def node_figures(name: str, **changes: Any) -> NodeFigures:
    made = NodeFigures(
        node_id=NodeId(name),
        activity=NodeActivity.ROLLING_OUT,
        silent_s=0.5,
        gpus=1,
        cost_per_hour=0.0,
        num_leases=4,
        capacity=8,
        produced=counts(500),
        accepted=counts(400),
        account={"rolling_out": 90.0, "waiting": 10.0},
        window_account={"rolling_out": 100.0},
    )
    return replace(made, **changes)


def figures(**changes: Any) -> Figures:
    made = Figures(
        run="reverse",
        since=900.0,
        window=WindowReport(index=3, opened_at=1000.0, closed_at=1100.0, complete=True),
        policies=(policy_figures(),),
        nodes=(node_figures("n0"), node_figures("n1")),
        departed_time={},
        waiting_slots=7,
        start_s_p90=2.0,
    )
    return replace(made, **changes)
