# SPDX-License-Identifier: Apache-2.0
"""HTTP routes of trainers, bound to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.stages import stage_subject
from penstock.config.trust import SCORE_STAGE
from penstock.dataflow.core.spot_checks import SpotCheck
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
    ProgressRequest,
    PublishRequest,
    QuarantineRequest,
    RowsAnswer,
)
from penstock.errors import BadRequest, Forbidden
from penstock.types import NodeId, subject_of_node
from penstock.wire.auth import Credential, Role
from penstock.wire.codec import MSGPACK
from penstock.wire.routes import Call, StreamedResponse, route

TRAINERS = frozenset({Role.TRAINER, Role.ADMIN})
CHECKERS = frozenset({Role.STAGE, Role.ADMIN})
READERS = frozenset({Role.READER, Role.TRAINER, Role.ADMIN})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerRoutes:
    trainers: TrainerHandlers

    @route("GET", "/v1/policies/{policy}", READERS)
    async def policy(self, call: Call) -> PolicyState:
        """State of this policy."""
        return self.trainers.policy_state(call.path["policy"])

    @route("POST", "/v1/policies/{policy}/incarnations", TRAINERS)
    async def incarnate(self, call: Call, body: IncarnationRequest) -> IncarnationAnswer:
        """Become the policy's only trainer, forking at a checkpoint."""
        return await self.trainers.incarnate(call.path["policy"], body)

    @route("POST", "/v1/policies/{policy}/versions", TRAINERS)
    async def publish(self, call: Call, body: PublishRequest) -> Ack:
        """Publish a committed version by compare-and-set."""
        await self.trainers.publish(call.path["policy"], body)
        return Ack()

    @route("PUT", "/v1/policies/{policy}/checkpoints", TRAINERS)
    async def checkpoints(self, call: Call, body: CheckpointsRequest) -> Ack:
        """List the checkpoints that the trainer can restore."""
        await self.trainers.checkpoints(call.path["policy"], body)
        return Ack()

    @route("PUT", "/v1/policies/{policy}/progress", TRAINERS)
    async def progress(self, call: Call, body: ProgressRequest) -> Ack:
        """Report that a long step advances, so that the run does not count as stalled."""
        self.trainers.record_progress(call.path["policy"], body)
        return Ack()

    @route("POST", "/v1/batches", TRAINERS)
    async def batch(self, call: Call, body: BatchRequest) -> BatchAnswer:
        """The sealed manifest number seq, or an instalment of it; held open until it exists."""
        return await self.trainers.batch(body)

    @route("POST", "/v1/batches/{batch_id}/rows", TRAINERS, response=RowsAnswer)
    async def rows(self, call: Call, body: BatchRowsRequest) -> object:
        """The rows of a sealed batch, or one rank's share."""
        policy, seq = _batch_id(call)
        wanted = await self.trainers.wanted(policy, seq, body.indexes, body.instalment)
        return await serve_rows(self.trainers.payloads, wanted, call)

    @route("POST", "/v1/batches/{batch_id}/commit", TRAINERS)
    async def commit(self, call: Call, body: CommitRequest) -> Ack:
        """Commit a batch as trained, or as skipped with a reason."""
        await self.trainers.commit(*_batch_id(call), body)
        return Ack()

    @route("POST", "/v1/nodes/{node_id}/checks", CHECKERS)
    async def check(self, call: Call, body: SpotCheck) -> Ack:
        """Report that a row of an untrusted node was generated again."""
        _require_checker(call.credential)
        await self.trainers.record_check(subject_of_node(NodeId(call.path["node_id"])), body)
        return Ack()

    @route("POST", "/v1/nodes/{node_id}/quarantine", TRAINERS)
    async def quarantine(self, call: Call, body: QuarantineRequest) -> Ack:
        """Quarantine a node whose engine disagrees with the trainer."""
        await self.trainers.quarantine(NodeId(call.path["node_id"]), body)
        return Ack()


def _require_checker(credential: Credential) -> None:
    """Checks put nodes in quarantine: no other stage has a say in that."""
    subject = stage_subject(SCORE_STAGE)
    if credential.role is not Role.ADMIN and credential.subject != subject:
        raise Forbidden(
            f"only {subject} reports checks of nodes, and this token is for "
            f"{credential.subject!r}; the launcher starts that stage with trust.accept_untrusted"
        )


async def serve_rows(payloads: RowPayloads, wanted: RowsQuery, call: Call) -> object:
    """Stream the rows in pieces, unless the caller accepts JSON."""
    if MSGPACK in call.headers.get("accept", ""):
        found = await payloads.find(wanted)
        return StreamedResponse(payloads.pieces(found), found.num_bytes)
    return await payloads.answer(wanted)


def _batch_id(call: Call) -> tuple[str, int]:
    text = call.path["batch_id"]
    policy, _, seq = text.rpartition(".")
    if not (policy and seq.isdecimal() and len(seq) < 16):
        raise BadRequest(f"invalid batch id {text[:80]!r}; expected CONSUMER.SEQ")
    return policy, int(seq)
