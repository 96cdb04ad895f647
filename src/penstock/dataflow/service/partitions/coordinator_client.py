# SPDX-License-Identifier: Apache-2.0
"""A partition's client for the coordinator: three calls, retried forever, since its work continues
meanwhile."""

from __future__ import annotations

from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPullAnswer,
    LinkPush,
    LinkPushAnswer,
    PartitionJoin,
)
from penstock.wire.client import AsyncServiceClient
from penstock.wire.held_token import Token

NO_DEADLINE_S = 10 * 365 * 24 * 3600.0


class CoordinatorClient:
    def __init__(self, url: str, token: Token) -> None:
        self._caller = AsyncServiceClient(url, token)

    async def close(self) -> None:
        await self._caller.close()

    async def join(self, index: int, body: PartitionJoin) -> Ack:
        path = f"/v1/partitions/{index}"
        return await self._caller.call("PUT", path, body, Ack, deadline_s=NO_DEADLINE_S)

    async def push(self, index: int, body: LinkPush) -> LinkPushAnswer:
        path = f"/v1/partitions/{index}/messages"
        return await self._caller.call("POST", path, body, LinkPushAnswer, deadline_s=NO_DEADLINE_S)

    async def pull(self, index: int, body: LinkPull) -> LinkPullAnswer:
        return await self._caller.call(
            "POST",
            f"/v1/partitions/{index}/orders",
            body,
            LinkPullAnswer,
            deadline_s=NO_DEADLINE_S,
            timeout_s=body.wait_s + 15.0,
        )
