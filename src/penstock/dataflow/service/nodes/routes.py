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
from penstock.errors import BadRequest
from penstock.types import NodeId, RowId
from penstock.wire.auth import Role
from penstock.wire.routes import Call, Route

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

    async def register(self, call: Call) -> RegisterAnswer:
        body: RegisterRequest = call.body
        if not 0 < body.capacity <= 100_000 or not _is_name(body.node_id):
            raise BadRequest(
                "node_id must match [A-Za-z0-9._-]{1,128}, capacity must be 1 to 100,000"
            )
        return RegisterAnswer(
            orders=await self.nodes.register(body),
            weights_url=self.weights_url,
            heartbeat_s=self.ttl_s / 4,
            ttl_s=self.ttl_s,
            facts=self.facts,
            partitions=self.partitions(),
        )

    async def heartbeat(self, call: Call) -> HeartbeatAnswer:
        orders = await self.nodes.heartbeat(NodeId(call.path["node_id"]), call.body)
        return HeartbeatAnswer(
            orders=orders, weights_url=self.weights_url, partitions=self.partitions()
        )

    async def leave(self, call: Call) -> Ack:
        await self.nodes.leave(NodeId(call.path["node_id"]), call.query.get("boot_id", ""))
        return Ack()

    async def lease(self, call: Call) -> LeaseAnswer:
        return await self.nodes.lease(call.body, call.is_disconnected)

    async def deliver(self, call: Call) -> DeliveryAnswer:
        return await self.nodes.deliver(call.body)

    async def record(self, call: Call) -> Ack:
        self.nodes.turns.record(call.body)
        return Ack()

    async def recorded(self, call: Call) -> TurnsAnswer:
        node_id = NodeId(call.query.get("node_id", ""))
        return self.nodes.turns.offer(node_id, RowId(call.path["row_id"]))

    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST",
                path="/v1/nodes",
                handler=self.register,
                roles=NODES,
                summary="Register a node, or a new process of a known node.",
                request=RegisterRequest,
                response=RegisterAnswer,
            ),
            Route(
                method="PUT",
                path="/v1/nodes/{node_id}",
                handler=self.heartbeat,
                roles=NODES,
                summary="Heartbeat: renews all leases of the node.",
                request=Heartbeat,
                response=HeartbeatAnswer,
            ),
            Route(
                method="DELETE",
                path="/v1/nodes/{node_id}",
                handler=self.leave,
                roles=NODES,
                summary="Leave the run; the node's leases go to other nodes immediately.",
                response=Ack,
                query=("boot_id",),
            ),
            Route(
                method="POST",
                path="/v1/leases",
                handler=self.lease,
                roles=NODES,
                summary="Lease up to n slots; held open when there is no work.",
                request=LeaseRequest,
                response=LeaseAnswer,
            ),
            Route(
                method="POST",
                path="/v1/trajectories",
                handler=self.deliver,
                roles=NODES,
                summary="Deliver results, fenced by lease epoch; durable when answered.",
                request=DeliveryRequest,
                response=DeliveryAnswer,
                max_body_bytes=DELIVERY_BYTES,
            ),
            Route(
                method="POST",
                path="/v1/turns",
                handler=self.record,
                roles=NODES,
                summary="Report finished turns of running attempts; kept in memory for a retry.",
                request=RecordRequest,
                response=Ack,
                max_body_bytes=DELIVERY_BYTES,
            ),
            Route(
                method="GET",
                path="/v1/turns/{row_id}",
                handler=self.recorded,
                roles=NODES,
                summary="Turns of earlier attempts at a leased slot, for reuse.",
                response=TurnsAnswer,
                query=("node_id",),
            ),
        ]


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 128 and all(c.isalnum() or c in "._-" for c in text)
