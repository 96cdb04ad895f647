# SPDX-License-Identifier: Apache-2.0
"""How other services reach the dataflow: one client per role, typed, patient over outages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.dataflow.client.blobs import INLINE_BYTES, put_blob
from penstock.dataflow.core.leasing import RegisterRequest
from penstock.dataflow.report.shape import BalanceReport
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import (
    Delivery,
    DeliveryAnswer,
    DeliveryRequest,
    Heartbeat,
    HeartbeatAnswer,
    LeaseAnswer,
    LeaseRequest,
    RecordRequest,
    RegisterAnswer,
    TurnsAnswer,
)
from penstock.dataflow.service.operators.messages import Status
from penstock.dataflow.service.trainers.messages import (
    BatchAnswer,
    BatchRequest,
    BatchRowsRequest,
    CheckpointsRequest,
    CommitRequest,
    IncarnationAnswer,
    IncarnationRequest,
    PolicyState,
    PublishRequest,
    QuarantineRequest,
    RowsAnswer,
    RowsRequest,
    VersionsInUse,
)
from penstock.types import NodeId, PolicyName, RowId, Turn
from penstock.wire.client import RETRY_DEADLINE_S, AsyncServiceClient, ServiceClient

HEARTBEAT_TIMEOUT_S = 4.0
"""Well under any ttl: one lost packet must not cost a node its leases."""
ROWS_TIMEOUT_S = 120.0
LEAVE_S = 5.0
"""A leaving node waits no longer for a service that is away: its leases expire by themselves."""


class NodeClient:
    """A rollout node's side of the contract."""

    def __init__(self, url: str, token: str) -> None:
        self._caller = AsyncServiceClient(url, token)

    async def close(self) -> None:
        await self._caller.close()

    async def register(
        self, body: RegisterRequest, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> RegisterAnswer:
        path = "/v1/nodes"
        return await self._caller.call("POST", path, body, RegisterAnswer, deadline_s=deadline_s)

    async def heartbeat(
        self, node_id: NodeId, body: Heartbeat, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> HeartbeatAnswer:
        return await self._caller.call(
            "PUT",
            f"/v1/nodes/{node_id}",
            body,
            HeartbeatAnswer,
            timeout_s=min(HEARTBEAT_TIMEOUT_S, deadline_s),
            deadline_s=deadline_s,
        )

    async def leave(self, node_id: NodeId, boot_id: str) -> None:
        path = f"/v1/nodes/{node_id}?boot_id={boot_id}"
        await self._caller.call("DELETE", path, None, Ack, deadline_s=LEAVE_S)

    async def lease(
        self, body: LeaseRequest, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> LeaseAnswer:
        return await self._caller.call(
            "POST",
            "/v1/leases",
            body,
            LeaseAnswer,
            timeout_s=body.wait_s + 15.0,
            deadline_s=deadline_s,
        )

    async def deliver(
        self, body: DeliveryRequest, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> DeliveryAnswer:
        """What is too large for a call goes ahead as a blob."""
        deliveries = [await self._checked(delivery, deadline_s) for delivery in body.deliveries]
        body = replace(body, deliveries=tuple(deliveries))
        path = "/v1/trajectories"
        return await self._caller.call("POST", path, body, DeliveryAnswer, deadline_s=deadline_s)

    async def record(self, body: RecordRequest, *, deadline_s: float = RETRY_DEADLINE_S) -> None:
        await self._caller.call("POST", "/v1/turns", body, Ack, deadline_s=deadline_s)

    async def recorded(
        self, node_id: NodeId, row_id: RowId, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> tuple[Turn, ...]:
        path = f"/v1/turns/{row_id}?node_id={node_id}"
        answer = await self._caller.call("GET", path, None, TurnsAnswer, deadline_s=deadline_s)
        return answer.turns

    async def _checked(self, delivery: Delivery, deadline_s: float) -> Delivery:
        if len(delivery.payload) <= INLINE_BYTES:
            return delivery
        ref = await put_blob(self._caller, delivery.payload, deadline_s=deadline_s)
        return replace(delivery, payload=memoryview(b""), blob=ref.digest)


class TrainerClient:
    """A trainer's side of the contract: six calls and a look."""

    def __init__(
        self, url: str, token: str, *, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._token = token
        self._is_stopping = is_stopping
        self._caller = ServiceClient(url, token, is_stopping=is_stopping)
        self._partitions: dict[str, ServiceClient] = {}

    def close(self) -> None:
        for caller in (self._caller, *self._partitions.values()):
            caller.close()

    def state(self, policy: PolicyName) -> PolicyState:
        return self._caller.call("GET", f"/v1/policies/{policy}", None, PolicyState)

    def incarnate(self, policy: PolicyName, body: IncarnationRequest) -> IncarnationAnswer:
        path = f"/v1/policies/{policy}/incarnations"
        return self._caller.call("POST", path, body, IncarnationAnswer)

    def batch(self, body: BatchRequest) -> BatchAnswer:
        timeout_s = body.wait_s + 15.0
        return self._caller.call("POST", "/v1/batches", body, BatchAnswer, timeout_s=timeout_s)

    def rows(
        self, policy: PolicyName, seq: int, indexes: Sequence[int] | None = None
    ) -> RowsAnswer:
        """Rows at these places of the manifest (None: all), each from the partition that holds
        it."""
        path = f"/v1/batches/{policy}.{seq}/rows"
        body = BatchRowsRequest(indexes=None if indexes is None else tuple(indexes))
        answer = self._caller.call("POST", path, body, RowsAnswer, timeout_s=ROWS_TIMEOUT_S)
        far: dict[str, list[RowId]] = {}
        for row in answer.rows:
            if row.at:
                far.setdefault(row.at, []).append(row.row_id)
        if not far:
            return answer
        fetched = {
            row.row_id: row
            for url, row_ids in far.items()
            for row in self._partition(url)
            .call(
                "POST",
                "/v1/rows",
                RowsRequest(row_ids=tuple(row_ids), columns=answer.columns),
                RowsAnswer,
                timeout_s=ROWS_TIMEOUT_S,
            )
            .rows
        }
        return RowsAnswer(rows=tuple(fetched.get(row.row_id, row) for row in answer.rows))

    def _partition(self, url: str) -> ServiceClient:
        if url not in self._partitions:
            self._partitions[url] = ServiceClient(url, self._token, is_stopping=self._is_stopping)
        return self._partitions[url]

    def commit(self, policy: PolicyName, seq: int, body: CommitRequest) -> None:
        self._caller.call("POST", f"/v1/batches/{policy}.{seq}/commit", body, Ack)

    def publish(self, policy: PolicyName, body: PublishRequest) -> None:
        self._caller.call("POST", f"/v1/policies/{policy}/versions", body, Ack)

    def versions_in_use(self) -> VersionsInUse:
        return self._caller.call("GET", "/v1/versions", None, VersionsInUse)

    def checkpoints(self, policy: PolicyName, body: CheckpointsRequest) -> None:
        self._caller.call("PUT", f"/v1/policies/{policy}/checkpoints", body, Ack)

    def quarantine(self, node_id: NodeId, body: QuarantineRequest) -> None:
        self._caller.call("POST", f"/v1/nodes/{node_id}/quarantine", body, Ack)


class StatusClient:
    """For people and panels; gives up soon, because somebody is watching."""

    def __init__(self, url: str, token: str, *, patience_s: float = 2.0) -> None:
        self._caller = ServiceClient(url, token)
        self._patience_s = patience_s

    def close(self) -> None:
        self._caller.close()

    def versions_in_use(self) -> VersionsInUse:
        return self._caller.call(
            "GET", "/v1/versions", None, VersionsInUse, deadline_s=self._patience_s
        )

    def status(self) -> Status:
        return self._caller.call(
            "GET", "/v1/status", None, Status, deadline_s=self._patience_s, timeout_s=5.0
        )

    def report(self) -> BalanceReport:
        return self._caller.call(
            "GET", "/v1/report", None, BalanceReport, deadline_s=self._patience_s, timeout_s=5.0
        )
