# SPDX-License-Identifier: Apache-2.0
"""HTTP routes between the coordinator and its partitions, for operators of partitions, and for
fetching rows from the partition that holds them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.partitions.handlers import PartitionHandlers
from penstock.dataflow.service.partitions.messages import (
    LinkPull,
    LinkPullAnswer,
    LinkPush,
    LinkPushAnswer,
    PartitionJoin,
)
from penstock.dataflow.service.row_payloads import RowPayloads, RowsQuery
from penstock.dataflow.service.trainers.messages import RowsAnswer, RowsRequest
from penstock.dataflow.service.trainers.routes import TRAINERS, serve_rows
from penstock.errors import BadRequest
from penstock.wire.auth import Role
from penstock.wire.routes import Call, Route

PARTITIONS = frozenset({Role.PARTITION, Role.ADMIN})
OPERATORS = frozenset({Role.ADMIN})
MAX_ROWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRoutes:
    """The coordinator's routes for partitions and their operators."""

    partitions: PartitionHandlers

    async def join(self, call: Call) -> Ack:
        return await self.partitions.join(_index(call), call.body)

    async def push(self, call: Call) -> LinkPushAnswer:
        return await self.partitions.push(_index(call), call.body)

    async def pull(self, call: Call) -> LinkPullAnswer:
        return await self.partitions.pull(_index(call), call.body)

    async def drain(self, call: Call) -> Ack:
        return await self.partitions.drain(_index(call))

    async def lose(self, call: Call) -> Ack:
        return await self.partitions.lose(_index(call))

    def routes(self) -> list[Route]:
        return [
            Route(
                method="PUT",
                path="/v1/partitions/{index}",
                handler=self.join,
                roles=PARTITIONS,
                summary="Register a partition: adds it, or replaces its previous process.",
                request=PartitionJoin,
                response=Ack,
            ),
            Route(
                method="POST",
                path="/v1/partitions/{index}/messages",
                handler=self.push,
                roles=PARTITIONS,
                summary="Messages of this partition to the coordinator, numbered; applied once.",
                request=LinkPush,
                response=LinkPushAnswer,
                max_body_bytes=64 << 20,
            ),
            Route(
                method="POST",
                path="/v1/partitions/{index}/orders",
                handler=self.pull,
                roles=PARTITIONS,
                summary="Orders for this partition; held open when there are none.",
                request=LinkPull,
                response=LinkPullAnswer,
            ),
            Route(
                method="POST",
                path="/v1/partitions/{index}/drain",
                handler=self.drain,
                roles=OPERATORS,
                summary="Drain this partition: no new groups; its status shows when it is gone.",
                response=Ack,
            ),
            Route(
                method="POST",
                path="/v1/partitions/{index}/lose",
                handler=self.lose,
                roles=OPERATORS,
                summary="Declare this partition permanently lost.",
                response=Ack,
            ),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPayloadRoutes:
    """Rows by id, at the partition that holds them."""

    payloads: RowPayloads

    async def rows(self, call: Call) -> object:
        body: RowsRequest = call.body
        if len(body.row_ids) > MAX_ROWS:
            raise BadRequest(f"at most {MAX_ROWS} rows per call, got {len(body.row_ids)}")
        wanted = RowsQuery(row_ids=body.row_ids, columns=body.columns)
        return await serve_rows(self.payloads, wanted, call)

    def routes(self) -> list[Route]:
        return [
            Route(
                method="POST",
                path="/v1/rows",
                handler=self.rows,
                roles=TRAINERS,
                summary="The payload of these rows.",
                request=RowsRequest,
                response=RowsAnswer,
            )
        ]


def _index(call: Call) -> int:
    text = call.path["index"]
    if not (text.isdecimal() and len(text) <= 4):
        raise BadRequest(f"invalid partition {text[:20]!r}; expected its number")
    return int(text)
