# SPDX-License-Identifier: Apache-2.0
"""Nodes whose tokens were revoked leave at once: their leases go to other nodes. That their calls
are refused is the verifier's work."""

from __future__ import annotations

import asyncio
from collections.abc import Set
from contextlib import suppress

import structlog

from penstock.dataflow.core.partition import Partition
from penstock.dataflow.service.nodes.handlers import NodeHandlers
from penstock.errors import Fenced, NotFound
from penstock.wire.denied import CHECK_S, Denied, DenyList

log = structlog.get_logger(__name__)


async def evict_denied(nodes: NodeHandlers, partition: Partition, denied: DenyList) -> None:
    """consumes: the deny list · produces: nodes that leave · waits for: CHECK_S

    A node of the same name with another token registers again by itself."""
    known = denied.current()
    while True:
        await asyncio.sleep(CHECK_S)
        newest = denied.current()
        if newest is not known:
            await _evict(nodes, partition, _added(known, newest))
            known = newest


def _added(known: Denied, newest: Denied) -> Set[str]:
    """Names with a revocation that was not known yet."""
    by_token = {name for id, name in newest.tokens.items() if id not in known.tokens}
    return by_token | (newest.subjects - known.subjects)


async def _evict(nodes: NodeHandlers, partition: Partition, names: Set[str]) -> None:
    held = [(id, node.record.boot_id) for id, node in partition.nodes.items()]
    for node_id, boot_id in held:
        if node_id.partition(".")[0] in names:
            log.warning("token revoked; its node is out", node=node_id)
            with suppress(NotFound, Fenced):  # it left, or a new process of it came, just now
                await nodes.leave(node_id, boot_id)
