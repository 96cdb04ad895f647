# SPDX-License-Identifier: Apache-2.0
"""The dataflow's standing orders to this node. They ride on every answer and all end up here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.dataflow.service.nodes.messages import NodeDirectives
from penstock.types import PolicyName, PublishedVersion, RowId


class NodeOrders:
    """What the node was last told. Answers may overtake each other, so orders only ever move
    forward."""

    def __init__(self) -> None:
        self.wanted: dict[PolicyName, PublishedVersion] = {}
        self.weights_url = ""
        self.changed = asyncio.Event()
        """Set when there is something new to load; its one reader clears it."""
        self.drained = asyncio.Event()
        self.is_finished = False
        self.on_stop: Callable[[RowId], None] = lambda row_id: None
        """Called for each lease of this node that was ended: its work is of use to nobody."""

    def apply(self, orders: NodeDirectives, weights_url: str = "") -> None:
        for version in orders.wanted:
            known = self.wanted.get(version.policy)
            if known is None or _age(known) < _age(version):
                self.wanted[version.policy] = version
                self.changed.set()
        self.weights_url = weights_url or self.weights_url
        self.is_finished = self.is_finished or orders.finished
        for row_id in orders.stop:
            self.on_stop(row_id)
        if orders.drain or orders.finished:
            self.drain()

    def drain(self) -> None:
        self.drained.set()


def _age(version: PublishedVersion) -> tuple[int, int]:
    return version.incarnation, version.number
