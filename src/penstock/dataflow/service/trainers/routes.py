# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of trainers, bound to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.service.messages import Ack
from penstock.dataflow.service.row_payloads import RowPayloads, RowsQuery
from penstock.dataflow.service.trainers.handlers import TrainerHandlers
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
)
from penstock.errors import BadRequest
from penstock.types import NodeId
from penstock.wire.auth import Role
from penstock.wire.codec import MSGPACK
from penstock.wire.routes import Call, Route, StreamedResponse

TRAINERS = frozenset({Role.TRAINER, Role.ADMIN})
READERS = frozenset({Role.READER, Role.TRAINER, Role.ADMIN})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRoutes:
    trainers: TrainerHandlers

    async def policy(self, call: Call) -> PolicyState:
        return self.trainers.policy_state(call.path["policy"])

    async def incarnate(self, call: Call) -> IncarnationAnswer:
        return await self.trainers.incarnate(call.path["policy"], call.body)

    async def publish(self, call: Call) -> Ack:
        await self.trainers.publish(call.path["policy"], call.body)
        return Ack()

    async def checkpoints(self, call: Call) -> Ack:
        await self.trainers.checkpoints(call.path["policy"], call.body)
        return Ack()

    async def batch(self, call: Call) -> BatchAnswer:
        return await self.trainers.batch(call.body)

    async def rows(self, call: Call) -> object:
        policy, seq = _batch_id(call.path["batch_id"])
        body: BatchRowsRequest = call.body
        wanted = await self.trainers.wanted(policy, seq, body.indexes)
        return await serve_rows(self.trainers.payloads, wanted, call)

    async def commit(self, call: Call) -> Ack:
        policy, seq = _batch_id(call.path["batch_id"])
        await self.trainers.commit(policy, seq, call.body)
        return Ack()

    async def quarantine(self, call: Call) -> Ack:
        await self.trainers.quarantine(NodeId(call.path["node_id"]), call.body)
        return Ack()

    def routes(self) -> list[Route]:
        return [
            Route(
                method="GET",
                path="/v1/policies/{policy}",
                handler=self.policy,
                roles=READERS,
                summary="State of this policy.",
                response=PolicyState,
            ),
            Route(
                method="POST",
                path="/v1/policies/{policy}/incarnations",
                handler=self.incarnate,
                roles=TRAINERS,
                summary="Become the policy's only trainer, forking at a checkpoint.",
                request=IncarnationRequest,
                response=IncarnationAnswer,
            ),
            Route(
                method="POST",
                path="/v1/policies/{policy}/versions",
                handler=self.publish,
                roles=TRAINERS,
                summary="Publish a committed version by compare-and-set.",
                request=PublishRequest,
                response=Ack,
            ),
            Route(
                method="PUT",
                path="/v1/policies/{policy}/checkpoints",
                handler=self.checkpoints,
                roles=TRAINERS,
                summary="List the checkpoints that the trainer can restore.",
                request=CheckpointsRequest,
                response=Ack,
            ),
            Route(
                method="POST",
                path="/v1/batches",
                handler=self.batch,
                roles=TRAINERS,
                summary="The sealed manifest number seq; held open until it exists.",
                request=BatchRequest,
                response=BatchAnswer,
            ),
            Route(
                method="POST",
                path="/v1/batches/{batch_id}/rows",
                handler=self.rows,
                roles=TRAINERS,
                summary="The rows of a sealed batch, or one rank's share.",
                request=BatchRowsRequest,
                response=RowsAnswer,
            ),
            Route(
                method="POST",
                path="/v1/batches/{batch_id}/commit",
                handler=self.commit,
                roles=TRAINERS,
                summary="Commit a batch as trained, or as skipped with a reason.",
                request=CommitRequest,
                response=Ack,
            ),
            Route(
                method="POST",
                path="/v1/nodes/{node_id}/quarantine",
                handler=self.quarantine,
                roles=TRAINERS,
                summary="Quarantine a node whose engine disagrees with the trainer.",
                request=QuarantineRequest,
                response=Ack,
            ),
        ]


async def serve_rows(payloads: RowPayloads, wanted: RowsQuery, call: Call) -> object:
    """Stream the rows in pieces, unless the caller accepts JSON."""
    if MSGPACK in call.headers.get("accept", ""):
        found = await payloads.find(wanted)
        return StreamedResponse(payloads.pieces(found), found.num_bytes)
    return await payloads.answer(wanted)


def _batch_id(text: str) -> tuple[str, int]:
    policy, _, seq = text.rpartition(".")
    if not (policy and seq.isdecimal() and len(seq) < 16):
        raise BadRequest(f"invalid batch id {text[:80]!r}; expected CONSUMER.SEQ")
    return policy, int(seq)
