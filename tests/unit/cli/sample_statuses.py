# SPDX-License-Identifier: Apache-2.0
"""Made-up answers of the dataflow, for what draws them."""

from __future__ import annotations

from penstock.dataflow.core.leasing import LiveVersion
from penstock.dataflow.service.operators.messages import (
    NodeStatus,
    PolicyStatus,
    Status,
    WaitStatus,
)
from penstock.runs.monitor import RunView
from penstock.types import NodeId, PolicyName

POLICY = PolicyName("policy")


def policy_status(number: int = 3, reward: float | None = 0.5, steps: int = 10) -> PolicyStatus:
    return PolicyStatus(
        policy=POLICY,
        incarnation=1,
        number=number,
        steps=steps,
        published=number,
        issued=4,
        ready=2,
        sealed=1,
        room=7,
        reward_mean=reward,
        staleness_mean=None if reward is None else 0.6,
        staleness_max=None if reward is None else 1,
        stats={},
    )


def status(*policies: PolicyStatus, finished: bool = False, since_s: float = 12.5) -> Status:
    node = NodeStatus(
        node_id=NodeId("node-0"),
        state="live",
        live=(LiveVersion(policy=POLICY, incarnation=1, number=3),),
        num_leases=100,
        capacity=256,
        silent_s=0.1,
        delivered=3072,
    )
    return Status(
        run="reverse",
        uptime_s=42.0,
        finished=finished,
        policies=policies or (policy_status(),),
        nodes=(node,),
        waiting=(WaitStatus(who="trainer policy", on="4 groups on node-0", since_s=since_s),),
        trajectories=3072,
        sampled_tokens=9000,
        wasted_tokens={"stale": 450},
        tokens_per_s=2145.4,
    )


def view(
    now: Status | None, *, elapsed_s: float = 42.0, unreachable_s: float = 0.0, note: str = ""
) -> RunView:
    return RunView(
        name="reverse",
        elapsed_s=elapsed_s,
        status=now,
        unreachable_s=unreachable_s,
        curves={"policy": [0.1, 0.2, 0.4, 0.5]},
        eta_s=61.0,
        note=note,
    )
