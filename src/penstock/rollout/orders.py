# SPDX-License-Identifier: Apache-2.0
"""The dataflow's orders to this node. Every response carries them; this module merges them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from penstock.dataflow.service.nodes.messages import NodeDirectives
from penstock.types import PolicyName, PublishedVersion, RowId


class NodeOrders:
    """The newest orders. Responses may arrive out of order, so orders never move backwards."""

    def __init__(self) -> None:
        self.targets: dict[PolicyName, PublishedVersion] = {}
        self.weights_url = ""
        self.changed = asyncio.Event()
        """Set when a target version changes; the loader clears it."""
        self.drained = asyncio.Event()
        self.is_finished = False
        self.on_stop: Callable[[RowId], None] = lambda row_id: None
        """Called for each lease of this node that has ended; its work can no longer be used."""

    def apply(self, orders: NodeDirectives, weights_url: str = "") -> None:
        for version in orders.wanted:
            known = self.targets.get(version.policy)
            if known is None or _age(known) < _age(version):
                self.targets[version.policy] = version
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
