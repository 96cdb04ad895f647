# SPDX-License-Identifier: Apache-2.0
"""Checks every call of a rollout node under test against the protocol.

Owns the rules for nodes and the faults they must survive: a lost lease response, a delivery that is
stored but answered with 503, a revoked lease, a service that lost its registration, bad weights, a
drain order. The caller decides when versions are published.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from penstock.conformance.dataflow_double import (
    HEARTBEAT_S,
    POLICY,
    DataflowDouble,
    Handler,
    TruncatedResponse,
)
from penstock.conformance.row_rules import Lease, check_row, read_row
from penstock.conformance.verdicts import Rule, RuleVerdicts
from penstock.conformance.weight_fetches import WeightFetches
from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.service.nodes.messages import (
    DeliveryAnswer,
    DeliveryRequest,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    NodeDirectives,
    RegisterAnswer,
)
from penstock.errors import NotFound, Unreachable
from penstock.types import NodeId, RowId, Trajectory
from penstock.weights.publish import StoredVersion
from penstock.wire.routes import Call

MAX_CAPACITY = 8
"""Cap on the node's capacity, so that the simulated node gets work too."""
MAX_HEARTBEAT_GAP_S = 3 * HEARTBEAT_S
DRAIN_S = 10.0
IN_FLIGHT_GRACE_S = 2.0
"""Grace period for calls in flight when an order reaches the node."""

RULES = (
    Rule("register-first", "the first call registers; node_id and boot_id stay the same"),
    Rule("heartbeat-in-time", f"a heartbeat every {HEARTBEAT_S:g} s, from joining to leaving"),
    Rule("rejoin-when-unknown", "after 404 the node registers again"),
    Rule("fetch-before-live", "a version is live only after its manifest and weights were fetched"),
    Rule("corrupt-blob-refused", "damaged bytes are fetched again before the version is live"),
    Rule("wrong-tensor-refused", "a version with tensors not in its manifest is never live"),
    Rule("lease-before-live", "no lease request before a version is live"),
    Rule("lease-repeated", "a lease request without a response is retried with its request_id"),
    Rule("delivery-repeated", "after 503 the same rows are sent again, byte for byte"),
    Rule("row-names-lease", "a row has its own id, its node's id and a granted lease"),
    Rule("lease-proven", "each result and each release has the secret of its lease"),
    Rule("spans-cover", "spans cover the sampled tokens without gaps or overlaps"),
    Rule("spans-name-live", "spans name fetched versions, none older than was live at the lease"),
    Rule("logprobs-at-most-0", "one finite log-prob per sampled token, none above 0"),
    Rule("reward-by-outcome", "completed and truncated rows have a reward, others do not"),
    Rule("fenced-dropped", "a row answered with `fenced` is not sent again"),
    Rule("new-version-loaded", "a newly published version is loaded and sampled from"),
    Rule("every-lease-ends", "each granted slot is delivered or released before leaving"),
    Rule("drain-obeyed", f"after a drain order, no lease requests, and gone in {DRAIN_S:g} s"),
)


FIRST_FAULTS = ("lease-repeated", "delivery-repeated", "fenced-dropped", "rejoin-when-unknown")
"""Rules whose faults are injected while the first version is live."""


class RolloutExaminer:
    def __init__(self, double: DataflowDouble) -> None:
        self.verdicts = RuleVerdicts(RULES)
        self.fetches = WeightFetches(double.store)
        self.draining = asyncio.Event()
        self.joined_at = 0.0
        self.left_at = 0.0
        self.last_call_at = time.monotonic()
        self.num_heartbeats = 0
        self.num_stored = 0
        self.sampled_numbers: set[int] = set()
        self._service = double.service
        self._node_id = NodeId("")
        self._boot_id = ""
        self._versions: dict[tuple[int, int], tuple[str, str]] = {}
        """Manifest digest and fault of each announced (incarnation, number)."""
        self._last_heartbeat_at = 0.0
        self._rejected_heartbeat_at: float | None = None
        self._lost_request: LeaseRequest | None = None
        self._has_lost_lease = False
        self._leases: dict[RowId, Lease] = {}
        self._ended: set[RowId] = set()
        self._payloads: dict[RowId, bytes] = {}
        self._awaiting_redelivery: set[RowId] | None = None
        self._has_revoked_lease = False
        self._fenced_rows: set[RowId] = set()
        self._drain_ordered_at = 0.0

    def expect(
        self, incarnation: int, number: int, stored: StoredVersion, *, fault: str = ""
    ) -> None:
        """Announce a version before it is published; `fault` is "damaged", "wrong" or empty."""
        self._versions[incarnation, number] = stored.manifest_digest, fault
        if fault == "damaged":
            self.fetches.damage(stored.manifest_digest)

    @property
    def has_seen_all_faults(self) -> bool:
        """Whether every fault of the first version has been exercised."""
        return all(map(self.verdicts.has_result, FIRST_FAULTS))

    @property
    def has_fetched_wrong_tensor(self) -> bool:
        """Whether the node fetched the version with the wrong tensor and could have loaded it."""
        wrong = [digest for digest, fault in self._versions.values() if fault == "wrong"]
        return any(map(self.fetches.has_all, wrong))

    # --- calls --------------------------------------------------------------------------------

    async def __call__(self, name: str, call: Call, handler: Handler) -> object:
        self.last_call_at = time.monotonic()
        examine = {
            "POST /v1/nodes": self._register,
            "PUT /v1/nodes/{node_id}": self._heartbeat,
            "DELETE /v1/nodes/{node_id}": self._leave,
            "POST /v1/leases": self._lease,
            "POST /v1/trajectories": self._deliver,
            "GET /v1/manifests/{digest}": self.fetches.manifest,
            "GET /v1/updates/{digest}": self.fetches.manifest,
            "GET /v1/blobs/{digest}": self.fetches.blob,
        }.get(name)
        if examine is None:
            return await handler(call)
        if not self.joined_at:
            is_first = name == "POST /v1/nodes"
            self.verdicts.check("register-first", is_first, f"the first call was {name}")
        if self.left_at:
            self.verdicts.mark_broken("drain-obeyed", f"{name} after the node had left")
        return await examine(call, handler)

    async def _register(self, call: Call, handler: Handler) -> object:
        body: RegisterRequest = call.body
        if not self.joined_at:
            self.joined_at = self._last_heartbeat_at = time.monotonic()
            self._node_id, self._boot_id = body.node_id, body.boot_id
        elif (body.node_id, body.boot_id) != (self._node_id, self._boot_id):
            self.verdicts.mark_broken(
                "register-first", f"{body.node_id} registered again with another id or boot_id"
            )
        if self._rejected_heartbeat_at is not None:
            self._rejected_heartbeat_at = None
            self.verdicts.mark_kept("rejoin-when-unknown")
        capped = replace(body, capacity=min(body.capacity, MAX_CAPACITY))
        answer = await handler(replace(call, body=capped))
        assert isinstance(answer, RegisterAnswer)
        return replace(answer, orders=self._orders(answer.orders))

    async def _heartbeat(self, call: Call, handler: Handler) -> object:
        body: Heartbeat = call.body
        self.check_heartbeat_gap()
        self._last_heartbeat_at = time.monotonic()
        self.num_heartbeats += 1
        self._check_live(body.live)
        is_live = body.state is NodeState.LIVE
        if is_live and not body.live:
            self.verdicts.mark_broken("fetch-before-live", "state is live but no version is")
        if is_live and self.num_stored and not self.verdicts.has_result("rejoin-when-unknown"):
            if self._rejected_heartbeat_at is None:
                self._rejected_heartbeat_at = time.monotonic()
                raise NotFound(f"node {self._node_id} is not registered; POST /v1/nodes first")
            self.verdicts.mark_broken(
                "rejoin-when-unknown", "sent another heartbeat without registering"
            )
        answer = await handler(call)
        assert isinstance(answer, HeartbeatAnswer)
        return replace(answer, orders=self._orders(answer.orders))

    async def _leave(self, call: Call, handler: Handler) -> object:
        answer = await handler(call)
        self.check_heartbeat_gap()
        self.left_at = time.monotonic()
        held = self._leases.keys() - self._ended
        detail = f"left with {len(held)} open leases, such as {min(held, default='')}"
        self.verdicts.check("every-lease-ends", not held, detail)
        if self._drain_ordered_at:
            took_s = self.left_at - self._drain_ordered_at
            self.verdicts.check("drain-obeyed", took_s <= DRAIN_S, f"took {took_s:.1f} s to leave")
        return answer

    async def _lease(self, call: Call, handler: Handler) -> object:
        body: LeaseRequest = call.body
        self.verdicts.check(
            "lease-before-live", bool(body.live), "lease request without a live version"
        )
        self._check_live(body.live)
        self._check_repeated_lease(body)
        if self._drain_ordered_at and time.monotonic() - self._drain_ordered_at > IN_FLIGHT_GRACE_S:
            self.verdicts.mark_broken("drain-obeyed", "requested a lease after the drain order")
        if not self._has_lost_lease:  # grant few slots, in case the node never retries
            call = replace(call, body=replace(body, max_slots=min(2, body.max_slots)))
        answer = await self._until_drained(call, handler)
        if answer.grants and not self._has_lost_lease:
            self._has_lost_lease, self._lost_request = True, body
            return TruncatedResponse()
        for grant in answer.grants:
            self._leases.setdefault(grant.row_id, Lease(grant=grant, live=body.live))
        if answer.grants and not self._has_revoked_lease:
            await self._revoke_lease(answer.grants[-1])
        return replace(answer, orders=self._orders(answer.orders))

    def _check_repeated_lease(self, body: LeaseRequest) -> None:
        lost = self._lost_request
        if lost is None:
            return
        self._lost_request = None
        detail = f"request {lost.request_id} got no response, the retry used {body.request_id}"
        self.verdicts.check("lease-repeated", body.request_id == lost.request_id, detail)

    async def _until_drained(self, call: Call, handler: Handler) -> LeaseAnswer:
        """End a long poll early when the node must drain, as the real service does."""
        handling = asyncio.ensure_future(handler(call))
        drained = asyncio.ensure_future(self.draining.wait())
        await asyncio.wait({handling, drained}, return_when=asyncio.FIRST_COMPLETED)
        drained.cancel()
        if handling.done():
            answer = handling.result()
            assert isinstance(answer, LeaseAnswer)
            return answer
        handling.cancel()
        return LeaseAnswer(tasks=(), grants=(), orders=self._service.nodes.orders(self._node_id))

    async def _revoke_lease(self, grant: Grant) -> None:
        """Release a lease without the node's knowledge; its slot is granted again with the next
        epoch."""
        self._has_revoked_lease = True
        node_id, boot_id, released = self._node_id, self._boot_id, {grant.row_id: ""}
        await self._service.nodes.deliver(
            DeliveryRequest(node_id=node_id, boot_id=boot_id, deliveries=(), released=released)
        )

    async def _deliver(self, call: Call, handler: Handler) -> object:
        body: DeliveryRequest = call.body
        for delivery in body.deliveries:
            row_id = delivery.row_id
            trajectory = read_row(delivery)
            lease = self._leases.get(row_id)
            for rule, wrong in check_row(delivery, trajectory, lease, self._node_id):
                self.verdicts.check(rule, not wrong, f"row {row_id[:80]}: {wrong}")
            self._check_secret(row_id, delivery.secret)
            if isinstance(trajectory, Trajectory):
                self._check_versions(trajectory)
            payload = bytes(delivery.payload)
            if self._payloads.setdefault(row_id, payload) != payload:
                self.verdicts.mark_broken(
                    "delivery-repeated", f"row {row_id} was sent again with other bytes"
                )
            if row_id in self._fenced_rows:
                self.verdicts.mark_broken("fenced-dropped", f"row {row_id} was sent again")
        for row_id, secret in body.released.items():
            self._check_secret(row_id, secret)
        sent = {delivery.row_id for delivery in body.deliveries}
        self._check_repeated_delivery(sent)
        self._ended |= sent | set(body.released)
        answer = await handler(call)
        assert isinstance(answer, DeliveryAnswer)
        stored = [r for r in answer.results if r.status is DeliveryStatus.STORED]
        self.num_stored += len(stored)
        if self._awaiting_redelivery is None and sent & {result.row_id for result in stored}:
            self._awaiting_redelivery = sent
            raise Unreachable("conformance: injected fault, the rows are stored", retry_after_s=0.1)
        for result in answer.results:
            if result.status is DeliveryStatus.FENCED and result.row_id in sent:
                self._fenced_rows.add(result.row_id)
                self.verdicts.mark_kept("fenced-dropped")
        return answer

    def _check_secret(self, row_id: RowId, secret: str) -> None:
        lease = self._leases.get(row_id)
        if lease is not None:
            detail = f"row {row_id[:80]} was sent without the secret in its grant"
            self.verdicts.check("lease-proven", secret == lease.grant.secret, detail)

    def _check_repeated_delivery(self, sent: set[RowId]) -> None:
        if self._awaiting_redelivery:
            self._awaiting_redelivery -= sent
            if not self._awaiting_redelivery:
                self.verdicts.mark_kept("delivery-repeated")

    # --- versions -----------------------------------------------------------------------------

    def _check_live(self, live: tuple[LiveVersion, ...]) -> None:
        for version in live:
            key = (version.incarnation, version.number)
            digest, fault = self._versions.get(key, ("", ""))
            if not digest or version.policy != POLICY:
                self.verdicts.mark_broken(
                    "fetch-before-live", f"{version} is live but was never published"
                )
            elif fault == "wrong":
                self.verdicts.mark_broken("wrong-tensor-refused", f"{key[0]}.{key[1]} is live")
            else:
                detail = f"{key[0]}.{key[1]} is live but not fully fetched"
                self.verdicts.check("fetch-before-live", self.fetches.has_all(digest), detail)
                if fault == "damaged":
                    is_intact = self.fetches.has_all(digest, undamaged=True)
                    self.verdicts.check("corrupt-blob-refused", is_intact, detail)

    def _check_versions(self, trajectory: Trajectory) -> None:
        for turn in trajectory.turns:
            for span in turn.spans:
                key = (span.incarnation, span.number)
                digest, fault = self._versions.get(key, ("", ""))
                detail = f"row {trajectory.row_id}: {key} was never fetched"
                is_fetched = fault == "wrong" or (bool(digest) and self.fetches.has_all(digest))
                self.verdicts.check("spans-name-live", is_fetched, detail)
                self.sampled_numbers.add(span.number)

    # --- orders and ends ----------------------------------------------------------------------

    def _orders(self, orders: NodeDirectives) -> NodeDirectives:
        if not self.draining.is_set():
            return orders
        self._drain_ordered_at = self._drain_ordered_at or time.monotonic()
        return replace(orders, drain=True)

    def check_heartbeat_gap(self) -> None:
        if not self.joined_at:
            return
        silent_s = time.monotonic() - self._last_heartbeat_at
        detail = f"{silent_s:.1f} s without a heartbeat"
        self.verdicts.check("heartbeat-in-time", silent_s <= MAX_HEARTBEAT_GAP_S, detail)

    def finish(self) -> None:
        """Mark rules as broken whose expected calls never came."""
        if self._awaiting_redelivery:
            self.verdicts.mark_broken(
                "delivery-repeated", f"row {min(self._awaiting_redelivery)} was not sent again"
            )
        if self._drain_ordered_at and not self.left_at:
            self.verdicts.mark_broken("drain-obeyed", "the node did not leave")
        if not self.left_at:
            self.check_heartbeat_gap()
        if self.left_at and self._has_revoked_lease and not self._fenced_rows:
            # Releasing the slot, or dropping its row without sending it, is fine too.
            self.verdicts.mark_kept("fenced-dropped")
