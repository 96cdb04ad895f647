# SPDX-License-Identifier: Apache-2.0
"""HTTP calls of rollout nodes: routes bound to one partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.dataflow.core.leasing import RegisterRequest
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.handlers import NodeHandlers
from penstock.dataflow.service.nodes.messages import (
    DeliveryAnswer,
    DeliveryRequest,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    PartitionAddress,
    RecordRequest,
    RegisterAnswer,
    RunInfo,
    TurnsAnswer,
)
from penstock.dataflow.service.nodes.trust import facts_for, require_same_trust, tagged
from penstock.errors import BadRequest
from penstock.types import NodeId, RowId
from penstock.wire.auth import Role
from penstock.wire.routes import Call, route

DELIVERY_BYTES = 64 << 20
NODES = frozenset({Role.ROLLOUT, Role.STAGE, Role.GATEWAY, Role.ADMIN})


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoutes:
    nodes: NodeHandlers
    facts: RunInfo
    weights_url: str
    ttl_s: float
    partitions: Callable[[], tuple[PartitionAddress, ...]] = tuple
    """Additional partitions for a node."""

    @route("POST", "/v1/nodes", NODES)
    async def register(self, call: Call, body: RegisterRequest) -> RegisterAnswer:
        """Register a node, or a new process of a known node."""
        if not 0 < body.capacity <= 100_000 or not _is_name(body.node_id):
            raise BadRequest(
                "node_id must match [A-Za-z0-9._-]{1,128}, capacity must be 1 to 100,000"
            )
        credential = call.credential
        body = tagged(body, credential, accepts_untrusted=self.facts.accepts_untrusted)
        require_same_trust(self.nodes.node(body.node_id), credential)
        return RegisterAnswer(
            orders=await self.nodes.register(body),
            weights_url=self.weights_url,
            heartbeat_s=self.ttl_s / 4,
            ttl_s=self.ttl_s,
            facts=facts_for(self.facts, credential),
            partitions=self.partitions(),
        )

    @route("PUT", "/v1/nodes/{node_id}", NODES)
    async def heartbeat(self, call: Call, body: Heartbeat) -> HeartbeatAnswer:
        """Heartbeat: renews all leases of the node."""
        orders = await self.nodes.heartbeat(NodeId(call.path["node_id"]), body)
        return HeartbeatAnswer(
            orders=orders, weights_url=self.weights_url, partitions=self.partitions()
        )

    @route("DELETE", "/v1/nodes/{node_id}", NODES, query=("boot_id",))
    async def leave(self, call: Call) -> Ack:
        """Leave the run; the node's leases go to other nodes immediately."""
        await self.nodes.leave(NodeId(call.path["node_id"]), call.query.get("boot_id", ""))
        return Ack()

    @route("POST", "/v1/leases", NODES)
    async def lease(self, call: Call, body: LeaseRequest) -> LeaseAnswer:
        """Lease up to n slots; held open when there is no work."""
        require_same_trust(self.nodes.node(body.node_id), call.credential)
        return await self.nodes.lease(body, call.is_disconnected)

    @route("POST", "/v1/trajectories", NODES, max_body_bytes=DELIVERY_BYTES)
    async def deliver(self, call: Call, body: DeliveryRequest) -> DeliveryAnswer:
        """Deliver results, fenced by lease epoch; durable when answered."""
        require_same_trust(self.nodes.node(body.node_id), call.credential)
        return await self.nodes.deliver(body)

    @route("POST", "/v1/turns", NODES, max_body_bytes=DELIVERY_BYTES)
    async def record(self, call: Call, body: RecordRequest) -> Ack:
        """Report finished turns of running attempts; kept in memory for a retry."""
        self.nodes.turns.record(body)
        return Ack()

    @route("GET", "/v1/turns/{row_id}", NODES, query=("node_id",))
    async def recorded(self, call: Call) -> TurnsAnswer:
        """Turns of earlier attempts at a leased slot, for reuse."""
        node_id = NodeId(call.query.get("node_id", ""))
        return self.nodes.turns.offer(node_id, RowId(call.path["row_id"]))


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 128 and all(c.isalnum() or c in "._-" for c in text)
