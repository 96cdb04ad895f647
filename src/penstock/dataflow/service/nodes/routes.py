# SPDX-License-Identifier: Apache-2.0
"""HTTP calls of rollout nodes: routes bound to one partition.

Every call proves who makes it before it reaches the partition: the token is for the node, a secret
shows that it is the registered process or holds the lease."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from penstock.dataflow.core.leasing import DeliveryStatus, RegisterRequest
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.handlers import NodeHandlers
from penstock.dataflow.service.nodes.messages import (
    MAX_ROWS,
    SECRET_HEADER,
    DeliveryAnswer,
    DeliveryRequest,
    DeliveryResult,
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
from penstock.dataflow.service.nodes.outline import check_deliveries, check_turns
from penstock.dataflow.service.nodes.proofs import NodeSecrets, check_node_id, require_node
from penstock.dataflow.service.nodes.quotas import NodeQuotas
from penstock.dataflow.service.nodes.trust import facts_for, require_same_trust, tagged
from penstock.errors import BadRequest, Fenced, Forbidden
from penstock.types import SESSION_TAG, NodeId, RowId
from penstock.wire.auth import Credential, Role
from penstock.wire.routes import Call, Route, route, routes_of

log = structlog.get_logger(__name__)

DELIVERY_BYTES = 64 << 20
NODES = frozenset({Role.ROLLOUT, Role.GATEWAY})
"""A gateway leases the slots of external agents, a rollout node all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRoutes:
    nodes: NodeHandlers
    facts: RunInfo
    weights_url: str
    ttl_s: float
    secrets: NodeSecrets
    quotas: NodeQuotas
    partitions: Callable[[], tuple[PartitionAddress, ...]] = tuple
    """Additional partitions for a node."""
    num_refused: Counter[str] = field(default_factory=Counter[str])
    """Calls with results without the secret of their lease, by subject."""

    @route("POST", "/v1/nodes", NODES, shares_budget=True)
    async def register(self, call: Call, body: RegisterRequest) -> RegisterAnswer:
        """Register a node, or a new process of a known node."""
        check_node_id(body.node_id)
        credential = call.credential
        self._require(credential, body.node_id)
        _require_tag(credential.role, body)
        body = tagged(body, credential, accepts_untrusted=self.facts.accepts_untrusted)
        self.quotas.check_registration(body)
        return RegisterAnswer(
            orders=await self.nodes.register(body),
            weights_url=self.weights_url,
            heartbeat_s=self.ttl_s / 4,
            ttl_s=self.ttl_s,
            facts=facts_for(self.facts, credential),
            partitions=self.partitions(),
            secret=self.secrets.of_boot(body.node_id, body.boot_id),
        )

    @route("PUT", "/v1/nodes/{node_id}", NODES, shares_budget=True)
    async def heartbeat(self, call: Call, body: Heartbeat) -> HeartbeatAnswer:
        """Heartbeat: renews all leases of the node."""
        node_id = NodeId(call.path["node_id"])
        self._require(call.credential, node_id)
        self.secrets.require_boot(node_id, body.boot_id, body.secret)
        orders = await self.nodes.heartbeat(node_id, body)
        return HeartbeatAnswer(
            orders=orders, weights_url=self.weights_url, partitions=self.partitions()
        )

    @route("DELETE", "/v1/nodes/{node_id}", NODES, query=("boot_id",), shares_budget=True)
    async def leave(self, call: Call) -> Ack:
        """Leave the run; the node's leases go to other nodes immediately."""
        node_id, boot_id = NodeId(call.path["node_id"]), call.query.get("boot_id", "")
        self._require(call.credential, node_id)
        self.secrets.require_boot(node_id, boot_id, call.headers.get(SECRET_HEADER, ""))
        await self.nodes.leave(node_id, boot_id)
        return Ack()

    @route("POST", "/v1/leases", NODES)
    async def lease(self, call: Call, body: LeaseRequest) -> LeaseAnswer:
        """Lease up to n slots; held open when there is no work."""
        self._require(call.credential, body.node_id)
        self.secrets.require_boot(body.node_id, body.boot_id, body.secret)
        if call.credential.role is Role.ROLLOUT:  # a gateway's agents end sessions as they like
            self.quotas.check_released(body.node_id)
        with self.quotas.poll(body.node_id):
            answer = await self.nodes.lease(body, call.is_disconnected)
        if not answer.grants:
            return answer
        return replace(answer, grants=self.secrets.with_secrets(body.node_id, answer.grants))

    @route(
        "POST",
        "/v1/trajectories",
        NODES,
        max_body_bytes=DELIVERY_BYTES,
        check_parts=check_deliveries,
        shares_budget=True,
    )
    async def deliver(self, call: Call, body: DeliveryRequest) -> DeliveryAnswer:
        """Deliver results, fenced by lease epoch and secret; durable when answered."""
        self._require(call.credential, body.node_id)
        _check_count(len(body.deliveries) + len(body.released))
        proven = self._proven(body)
        answer = await self.nodes.deliver(proven)
        if proven is body:
            return answer
        given = [*(delivery.row_id for delivery in body.deliveries), *body.released]
        self.num_refused[call.credential.subject] += 1
        refused = self.num_refused[call.credential.subject]
        if refused.bit_count() == 1:  # each time that their number doubles
            log.warning(
                "results without the secret of their lease refused",
                node=body.node_id,
                num_rows=len(given) - len(answer.results),
                num_calls=refused,
            )
        return replace(answer, results=_in_order(given, proven, answer))

    def _require(self, credential: Credential, node_id: NodeId) -> None:
        """Raise unless this credential may act as this node."""
        require_node(credential, node_id)
        require_same_trust(self.nodes.node(node_id), credential)

    def _proven(self, body: DeliveryRequest) -> DeliveryRequest:
        """The same request when every row has the secret of its lease, else one without the
        others."""
        node_id, is_proven = body.node_id, self.secrets.is_of_lease
        rows = tuple([d for d in body.deliveries if is_proven(node_id, d.row_id, d.secret)])
        released = {r: s for r, s in body.released.items() if is_proven(node_id, r, s)}
        if len(rows) == len(body.deliveries) and len(released) == len(body.released):
            return body
        return replace(body, deliveries=rows, released=released)

    @route(
        "POST",
        "/v1/turns",
        NODES,
        max_body_bytes=DELIVERY_BYTES,
        check_parts=check_turns,
        shares_budget=True,
    )
    async def record(self, call: Call, body: RecordRequest) -> Ack:
        """Report finished turns of running attempts; kept in memory for a retry."""
        self._require(call.credential, body.node_id)
        is_proven = self.secrets.is_of_lease
        turns = [t for t in body.turns if is_proven(body.node_id, t.row_id, t.secret)]
        self.nodes.turns.record(replace(body, turns=tuple(turns)))
        return Ack()

    @route("GET", "/v1/turns/{row_id}", NODES, query=("node_id",), shares_budget=True)
    async def recorded(self, call: Call) -> TurnsAnswer:
        """Turns of earlier attempts at a leased slot, for reuse."""
        node_id, row_id = NodeId(call.query.get("node_id", "")), RowId(call.path["row_id"])
        self._require(call.credential, node_id)
        if not self.secrets.is_of_lease(node_id, row_id, call.headers.get(SECRET_HEADER, "")):
            raise Fenced(
                f"this is not the secret of the lease of {row_id[:128]}; stop working on it"
            )
        return self.nodes.turns.offer(node_id, row_id)


def node_routes(
    nodes: NodeHandlers,
    facts: RunInfo,
    weights_url: str,
    ttl_s: float,
    partitions: Callable[[], tuple[PartitionAddress, ...]] = tuple,
) -> list[Route]:
    """The routes of one partition, with the key of its ledger folder."""
    return routes_of(
        NodeRoutes(
            nodes=nodes,
            facts=facts,
            weights_url=weights_url,
            ttl_s=ttl_s,
            secrets=NodeSecrets.open(
                nodes.process.ledger.folder, run=facts.run, partition=nodes.partition.index
            ),
            quotas=NodeQuotas(
                nodes.partition.node_registry, nodes.process.clock, nodes.forget_silent
            ),
            partitions=partitions,
        )
    )


def _require_tag(role: Role, body: RegisterRequest) -> None:
    """Slots of external agents are for gateways, and no others are."""
    if (SESSION_TAG in body.tags) != (role is Role.GATEWAY):
        raise Forbidden(
            f"role {role} with tags {list(body.tags)[:8]}: a gateway registers with the tag "
            f"{SESSION_TAG!r}, a rollout node without it; use a token of the other role"
        )


def _check_count(num_rows: int) -> None:
    if num_rows > MAX_ROWS:
        raise BadRequest(f"{num_rows} rows in one call; at most {MAX_ROWS}: send several calls")


def _in_order(
    given: Sequence[RowId], proven: DeliveryRequest, answer: DeliveryAnswer
) -> tuple[DeliveryResult, ...]:
    """A result for every row of the request: fenced for those without a proof."""
    names = [*(delivery.row_id for delivery in proven.deliveries), *proven.released]
    found = dict(zip(names, answer.results, strict=True))
    fenced = DeliveryStatus.FENCED
    return tuple([found.get(r) or DeliveryResult(row_id=r, status=fenced) for r in given])
