# SPDX-License-Identifier: Apache-2.0
"""`penstock rollout`: one node of a run folder on this machine."""

from __future__ import annotations

from pathlib import Path


def rollout(
    *,
    run_dir: Path,
    name: str = "node-0",
    policy: str | None = None,
    capacity: int | None = None,
) -> int:
    """Lease tasks, generate, score and deliver until the run ends or SIGTERM.

    Parameters
    ----------
    run_dir
        The run folder.
    name
        Names this node; kept over its restarts.
    policy
        Whose engine settings to use; may be left out when the run has one policy.
    capacity
        Slots to work on at once; by default the config's.
    """
    import uvloop

    from penstock.cli.service import enter, leave, only_policy, token_for
    from penstock.types import NodeId
    from penstock.wire.auth import Role

    folder, config, endpoints = enter(run_dir, name)
    model = config.models[only_policy(config, policy)]
    folder.acks.mkdir(exist_ok=True)
    from penstock.rollout.node import run_node

    uvloop.run(
        run_node(
            endpoints.dataflow,
            token_for(folder, config, Role.ROLLOUT),
            node_id=NodeId(name),
            state_dir=folder.nodes / name,
            acks=folder.acks / f"{name}.txt",
            capacity=capacity or model.capacity,
            engine=model.engine,
        )
    )
    leave(0)
