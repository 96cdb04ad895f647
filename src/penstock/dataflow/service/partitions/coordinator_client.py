# SPDX-License-Identifier: Apache-2.0
"""How a partition reaches home: three calls, patient without end, for its work goes on
meanwhile."""

from __future__ import annotations

from penstock.dataflow.service.messages import Done
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPulled,
    LinkPush,
    LinkPushed,
    PartitionJoin,
)
from penstock.wire.client import AsyncCaller

FOR_EVER_S = 10 * 365 * 24 * 3600.0


class HomeClient:
    def __init__(self, url: str, token: str) -> None:
        self._caller = AsyncCaller(url, token)

    async def close(self) -> None:
        await self._caller.close()

    async def join(self, index: int, body: PartitionJoin) -> Done:
        path = f"/v1/partitions/{index}"
        return await self._caller.call("PUT", path, body, Done, deadline_s=FOR_EVER_S)

    async def push(self, index: int, body: LinkPush) -> LinkPushed:
        path = f"/v1/partitions/{index}/messages"
        return await self._caller.call("POST", path, body, LinkPushed, deadline_s=FOR_EVER_S)

    async def pull(self, index: int, body: LinkPull) -> LinkPulled:
        return await self._caller.call(
            "POST",
            f"/v1/partitions/{index}/orders",
            body,
            LinkPulled,
            deadline_s=FOR_EVER_S,
            timeout_s=body.wait_s + 15.0,
        )
