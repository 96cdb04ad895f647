# SPDX-License-Identifier: Apache-2.0
"""Typed clients of the dataflow service, one per role. They retry during outages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from penstock.dataflow.client.blobs import INLINE_BYTES, put_blob
from penstock.dataflow.client.statistics import within_bounds
from penstock.dataflow.core.leasing import RegisterRequest
from penstock.dataflow.report.shape import BalanceReport
from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.nodes.messages import (
    SECRET_HEADER,
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
    ProgressRequest,
    PublishRequest,
    QuarantineRequest,
    RowsAnswer,
    RowsRequest,
    VersionsInUse,
)
from penstock.types import NodeId, PolicyName, RowId, RowPayload, Turn
from penstock.wire.client import RETRY_DEADLINE_S, AsyncServiceClient, ServiceClient
from penstock.wire.codec import decode
from penstock.wire.held_token import Token

T = TypeVar("T")
HEARTBEAT_TIMEOUT_S = 4.0
"""Well below any ttl, so that one lost packet does not cost a node its leases."""
PROGRESS_DEADLINE_S = 5.0
ROWS_TIMEOUT_S = 120.0
STATUS_TIMEOUT_S = 5.0
STATUS_ANSWER_S = 10.0
"""Of a whole answer, by a service that the owner of a run folder may have made."""
MAX_STATUS_BYTES = 64 << 20
LEAVE_S = 5.0
"""A leaving node does not wait longer for an unreachable service; its leases expire anyway."""


class NodeClient:
    """Calls of a rollout node."""

    def __init__(self, url: str, token: Token) -> None:
        self._caller = AsyncServiceClient(url, token)
        self._boot_secrets: dict[NodeId, str] = {}
        """From the newest registration of each node that uses this client."""

    async def close(self) -> None:
        await self._caller.close()

    async def register(
        self, body: RegisterRequest, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> RegisterAnswer:
        path = "/v1/nodes"
        answer = await self._caller.call("POST", path, body, RegisterAnswer, deadline_s=deadline_s)
        self._boot_secrets[body.node_id] = answer.secret
        return answer

    def _secret(self, node_id: NodeId) -> str:
        return self._boot_secrets.get(node_id, "")

    async def heartbeat(
        self, node_id: NodeId, body: Heartbeat, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> HeartbeatAnswer:
        return await self._caller.call(
            "PUT",
            f"/v1/nodes/{node_id}",
            replace(body, secret=self._secret(node_id)),
            HeartbeatAnswer,
            timeout_s=min(HEARTBEAT_TIMEOUT_S, deadline_s),
            deadline_s=deadline_s,
        )

    async def leave(self, node_id: NodeId, boot_id: str) -> None:
        path, headers = f"/v1/nodes/{node_id}?boot_id={boot_id}", _proof(self._secret(node_id))
        await self._caller.request("DELETE", path, deadline_s=LEAVE_S, headers=headers)

    async def lease(
        self, body: LeaseRequest, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> LeaseAnswer:
        return await self._caller.call(
            "POST",
            "/v1/leases",
            replace(body, secret=self._secret(body.node_id)),
            LeaseAnswer,
            timeout_s=body.wait_s + 15.0,
            deadline_s=deadline_s,
        )

    async def deliver(
        self, body: DeliveryRequest, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> DeliveryAnswer:
        """Deliver trajectories; large ones are uploaded as blobs first."""
        deliveries = [await self._upload(delivery, deadline_s) for delivery in body.deliveries]
        body = replace(body, deliveries=tuple(deliveries))
        path = "/v1/trajectories"
        return await self._caller.call("POST", path, body, DeliveryAnswer, deadline_s=deadline_s)

    async def record(self, body: RecordRequest, *, deadline_s: float = RETRY_DEADLINE_S) -> None:
        await self._caller.call("POST", "/v1/turns", body, Ack, deadline_s=deadline_s)

    async def recorded(
        self, node_id: NodeId, row_id: RowId, secret: str, *, deadline_s: float = RETRY_DEADLINE_S
    ) -> tuple[Turn, ...]:
        """`secret`: of the lease under which the row is made."""
        path, headers = f"/v1/turns/{row_id}?node_id={node_id}", _proof(secret)
        answer = await self._caller.request("GET", path, deadline_s=deadline_s, headers=headers)
        return decode(answer.content, TurnsAnswer).turns

    async def _upload(self, delivery: Delivery, deadline_s: float) -> Delivery:
        if len(delivery.payload) <= INLINE_BYTES:
            return delivery
        ref = await put_blob(self._caller, delivery.payload, deadline_s=deadline_s)
        return replace(delivery, payload=memoryview(b""), blob=ref.digest)


def _proof(secret: str) -> dict[str, str]:
    return {SECRET_HEADER: secret}


class TrainerClient:
    """Calls of a trainer."""

    def __init__(
        self, url: str, token: Token, *, is_stopping: Callable[[], bool] = lambda: False
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
        """Rows at these indexes of the manifest (None for all), each from its partition."""
        wanted = None if indexes is None else tuple(indexes)
        return self._rows(policy, seq, BatchRowsRequest(indexes=wanted))

    def instalment_rows(self, policy: PolicyName, seq: int, instalment: int) -> RowsAnswer:
        """Rows of one instalment of a batch, each from its partition."""
        return self._rows(policy, seq, BatchRowsRequest(instalment=instalment))

    def _rows(self, policy: PolicyName, seq: int, body: BatchRowsRequest) -> RowsAnswer:
        path = f"/v1/batches/{policy}.{seq}/rows"
        answer = self._caller.call("POST", path, body, RowsAnswer, timeout_s=ROWS_TIMEOUT_S)
        remote: dict[str, list[RowId]] = {}
        for row in answer.rows:
            if row.at:
                remote.setdefault(row.at, []).append(row.row_id)
        if not remote:
            return answer
        fetched: dict[RowId, RowPayload] = {}
        for url, row_ids in remote.items():
            wanted = RowsRequest(row_ids=tuple(row_ids), columns=answer.columns)
            found = self._partition(url).call(
                "POST", "/v1/rows", wanted, RowsAnswer, timeout_s=ROWS_TIMEOUT_S
            )
            fetched |= {row.row_id: row for row in found.rows}
        return RowsAnswer(rows=tuple(fetched.get(row.row_id, row) for row in answer.rows))

    def _partition(self, url: str) -> ServiceClient:
        if url not in self._partitions:
            self._partitions[url] = ServiceClient(url, self._token, is_stopping=self._is_stopping)
        return self._partitions[url]

    def commit(self, policy: PolicyName, seq: int, body: CommitRequest) -> None:
        """Without statistics that do not fit: a commit that is refused would end the trainer, and
        at every start again."""
        body = replace(body, stats=within_bounds(body.stats))
        self._caller.call("POST", f"/v1/batches/{policy}.{seq}/commit", body, Ack)

    def publish(self, policy: PolicyName, body: PublishRequest) -> None:
        self._caller.call("POST", f"/v1/policies/{policy}/versions", body, Ack)

    def versions_in_use(self) -> VersionsInUse:
        return self._caller.call("GET", "/v1/versions", None, VersionsInUse)

    def checkpoints(self, policy: PolicyName, body: CheckpointsRequest) -> None:
        self._caller.call("PUT", f"/v1/policies/{policy}/checkpoints", body, Ack)

    def progress(self, policy: PolicyName, num_done: int) -> None:
        """Report that a step advances; gives up soon, since the next report says more."""
        self._caller.call(
            "PUT",
            f"/v1/policies/{policy}/progress",
            ProgressRequest(num_done=num_done),
            Ack,
            deadline_s=PROGRESS_DEADLINE_S,
            timeout_s=PROGRESS_DEADLINE_S,
        )

    def quarantine(self, node_id: NodeId, body: QuarantineRequest) -> None:
        self._caller.call("POST", f"/v1/nodes/{node_id}/quarantine", body, Ack)


class StatusClient:
    """Read-only calls for the command line; gives up quickly because a person is waiting."""

    def __init__(self, url: str, token: Token, *, patience_s: float = 2.0) -> None:
        self._caller = ServiceClient(
            url, token, max_response_bytes=MAX_STATUS_BYTES, answer_s=STATUS_ANSWER_S
        )
        self._patience_s = patience_s

    def close(self) -> None:
        self._caller.close()

    def versions_in_use(self) -> VersionsInUse:
        return self._get("/v1/versions", VersionsInUse)

    def status(self) -> Status:
        return self._get("/v1/status", Status)

    def report(self) -> BalanceReport:
        return self._get("/v1/report", BalanceReport)

    def _get(self, path: str, kind: type[T]) -> T:
        return self._caller.call(
            "GET", path, None, kind, deadline_s=self._patience_s, timeout_s=STATUS_TIMEOUT_S
        )
