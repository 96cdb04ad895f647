# SPDX-License-Identifier: Apache-2.0
"""How other services reach the dataflow: one client per role, typed, patient over outages."""

from __future__ import annotations

from collections.abc import Callable

from penstock.dataflow.protocol import (
    BatchAnswer,
    BatchRequest,
    CheckpointsRequest,
    CommitRequest,
    DeliveryAnswer,
    DeliveryRequest,
    Done,
    Heartbeat,
    HeartbeatAnswer,
    IncarnationAnswer,
    IncarnationRequest,
    LeaseAnswer,
    LeaseRequest,
    PolicyState,
    PublishRequest,
    Register,
    Registered,
    RowsAnswer,
    Status,
)
from penstock.types import NodeId, PolicyName
from penstock.wire.client import AsyncCaller, Caller

HEARTBEAT_TIMEOUT_S = 4.0
"""Well under any ttl: one lost packet must not cost a node its leases."""
LEAVE_S = 5.0
"""A leaving node waits no longer for a service that is away: its leases expire by themselves."""


class NodeClient:
    """A rollout node's side of the contract."""

    def __init__(self, url: str, token: str) -> None:
        self._caller = AsyncCaller(url, token)

    async def close(self) -> None:
        await self._caller.close()

    async def register(self, body: Register) -> Registered:
        return await self._caller.call("POST", "/v1/nodes", body, Registered)

    async def heartbeat(self, node_id: NodeId, body: Heartbeat) -> HeartbeatAnswer:
        path = f"/v1/nodes/{node_id}"
        return await self._caller.call(
            "PUT", path, body, HeartbeatAnswer, timeout_s=HEARTBEAT_TIMEOUT_S
        )

    async def leave(self, node_id: NodeId, session: str) -> None:
        path = f"/v1/nodes/{node_id}?session={session}"
        await self._caller.call("DELETE", path, None, Done, deadline_s=LEAVE_S)

    async def lease(self, body: LeaseRequest) -> LeaseAnswer:
        timeout_s = body.wait_s + 15.0
        return await self._caller.call("POST", "/v1/leases", body, LeaseAnswer, timeout_s=timeout_s)

    async def deliver(self, body: DeliveryRequest) -> DeliveryAnswer:
        return await self._caller.call("POST", "/v1/trajectories", body, DeliveryAnswer)


class TrainerClient:
    """A trainer's side of the contract: six calls and a look."""

    def __init__(
        self, url: str, token: str, *, is_stopping: Callable[[], bool] = lambda: False
    ) -> None:
        self._caller = Caller(url, token, is_stopping=is_stopping)

    def close(self) -> None:
        self._caller.close()

    def state(self, policy: PolicyName) -> PolicyState:
        return self._caller.call("GET", f"/v1/policies/{policy}", None, PolicyState)

    def incarnate(self, policy: PolicyName, body: IncarnationRequest) -> IncarnationAnswer:
        path = f"/v1/policies/{policy}/incarnations"
        return self._caller.call("POST", path, body, IncarnationAnswer)

    def batch(self, body: BatchRequest) -> BatchAnswer:
        timeout_s = body.wait_s + 15.0
        return self._caller.call("POST", "/v1/batches", body, BatchAnswer, timeout_s=timeout_s)

    def rows(self, policy: PolicyName, seq: int, rank: int = 0, of: int = 1) -> RowsAnswer:
        path = f"/v1/batches/{policy}.{seq}/rows?rank={rank}&of={of}"
        return self._caller.call("GET", path, None, RowsAnswer, timeout_s=120.0)

    def commit(self, policy: PolicyName, seq: int, body: CommitRequest) -> None:
        self._caller.call("POST", f"/v1/batches/{policy}.{seq}/commit", body, Done)

    def publish(self, policy: PolicyName, body: PublishRequest) -> None:
        self._caller.call("POST", f"/v1/policies/{policy}/versions", body, Done)

    def checkpoints(self, policy: PolicyName, body: CheckpointsRequest) -> None:
        self._caller.call("PUT", f"/v1/policies/{policy}/checkpoints", body, Done)


class ReaderClient:
    """For people and panels; gives up soon, because somebody is watching."""

    def __init__(self, url: str, token: str, *, patience_s: float = 2.0) -> None:
        self._caller = Caller(url, token)
        self._patience_s = patience_s

    def close(self) -> None:
        self._caller.close()

    def status(self) -> Status:
        return self._caller.call(
            "GET", "/v1/status", None, Status, deadline_s=self._patience_s, timeout_s=5.0
        )
