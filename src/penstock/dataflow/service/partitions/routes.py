# SPDX-License-Identifier: Apache-2.0
"""HTTP routes between the coordinator and its partitions, for operators of partitions, and for
fetching rows from the partition that holds them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.partitions.handlers import (
    PartitionHandlers,
    partition_subject,
)
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
from penstock.errors import BadRequest, Forbidden
from penstock.observe.admin_log import AdminAction
from penstock.wire.auth import Role
from penstock.wire.routes import Call, route

PARTITIONS = frozenset({Role.PARTITION, Role.ADMIN})
OPERATORS = frozenset({Role.ADMIN})
MAX_ROWS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRoutes:
    """The coordinator's routes for partitions and their operators."""

    partitions: PartitionHandlers

    @route("PUT", "/v1/partitions/{index}", PARTITIONS)
    async def join(self, call: Call, body: PartitionJoin) -> Ack:
        """Register a partition: adds it, or replaces its previous process."""
        may_move = call.credential.role is Role.ADMIN
        return await self.partitions.join(_own_index(call), body, may_move=may_move)

    @route("POST", "/v1/partitions/{index}/messages", PARTITIONS, max_body_bytes=64 << 20)
    async def push(self, call: Call, body: LinkPush) -> LinkPushAnswer:
        """Messages of this partition to the coordinator, numbered; applied once."""
        return await self.partitions.push(_own_index(call), body)

    @route("POST", "/v1/partitions/{index}/orders", PARTITIONS)
    async def pull(self, call: Call, body: LinkPull) -> LinkPullAnswer:
        """Orders for this partition; held open when there are none."""
        return await self.partitions.pull(_own_index(call), body)

    @route("POST", "/v1/partitions/{index}/drain", OPERATORS, audited=AdminAction.PARTITION_DRAINED)
    async def drain(self, call: Call) -> Ack:
        """Drain this partition: no new groups; its status shows when it is gone."""
        return await self.partitions.drain(_index(call))

    @route("POST", "/v1/partitions/{index}/lose", OPERATORS, audited=AdminAction.PARTITION_LOST)
    async def lose(self, call: Call) -> Ack:
        """Declare this partition permanently lost."""
        return await self.partitions.lose(_index(call))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPayloadRoutes:
    """Rows by id, at the partition that holds them."""

    payloads: RowPayloads

    @route("POST", "/v1/rows", TRAINERS, response=RowsAnswer)
    async def rows(self, call: Call, body: RowsRequest) -> object:
        """The payload of these rows."""
        if len(body.row_ids) > MAX_ROWS:
            raise BadRequest(f"at most {MAX_ROWS} rows per call, got {len(body.row_ids)}")
        wanted = RowsQuery(row_ids=body.row_ids, columns=body.columns)
        return await serve_rows(self.payloads, wanted, call)


def _own_index(call: Call) -> int:
    """The partition in the path, which the caller's token must be for; an operator's is for any."""
    index = _index(call)
    credential = call.credential
    if credential.role is not Role.ADMIN and credential.subject != partition_subject(index):
        raise Forbidden(
            f"this token names {credential.subject!r}, not partition {index}; mint "
            f"one with `penstock token RUN --role partition --name {partition_subject(index)}`"
        )
    return index


def _index(call: Call) -> int:
    text = call.path["index"]
    if not (text.isdecimal() and len(text) <= 4):
        raise BadRequest(f"invalid partition {text[:20]!r}; expected its number")
    return int(text)
