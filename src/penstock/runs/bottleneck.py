# SPDX-License-Identifier: Apache-2.0
"""Which side of a run the other side waits for. Pure."""

from __future__ import annotations

from penstock.dataflow.service.operators.messages import Status

NODES, TRAINER, NEITHER = "nodes", "step", ""


def bottleneck(status: Status) -> str:
    """What the run waits for: the nodes while a trainer waits for a batch, the trainer while nodes
    wait for work; empty if neither waits, or both."""
    trainers = any(one.who.startswith("trainer ") for one in status.waiting)
    names = {str(node.node_id) for node in status.nodes}
    nodes = any(one.who in names for one in status.waiting)
    if status.finished or trainers == nodes:
        return NEITHER
    return NODES if trainers else TRAINER
