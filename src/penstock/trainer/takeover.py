# SPDX-License-Identifier: Apache-2.0
"""How a trainer becomes the only one of its policy.

Comes before its models are loaded: the trainer that it replaces may be alive, and go on to save
checkpoints and to remove the one that is being loaded. Owns the fork point: the cursor of the
newest checkpoint, never what the ledger says."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Protocol

import structlog

from penstock.dataflow.service.trainers.messages import (
    IncarnationAnswer,
    IncarnationRequest,
    PolicyState,
)
from penstock.errors import Conflict, ResumeRejected, UnknownCommit
from penstock.trainer.checkpoint import Checkpoints
from penstock.trainer.checkpoint_manifest import Checkpoint
from penstock.types import PolicyName

_log = structlog.get_logger(__name__)


class Incarnations(Protocol):
    def state(self, policy: PolicyName) -> PolicyState: ...

    def incarnate(self, policy: PolicyName, body: IncarnationRequest) -> IncarnationAnswer: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Takeover:
    checkpoint: Checkpoint
    """To be restored."""
    incarnation: int


def take_over(dataflow: Incarnations, policy: PolicyName, checkpoints: Checkpoints) -> Takeover:
    """Fork at the newest checkpoint; `checkpoints` has opened it."""
    while True:
        checkpoint, known = checkpoints.last, dataflow.state(policy).incarnation
        cursor = checkpoint.cursor
        request = IncarnationRequest(
            request_id=secrets.token_hex(16),
            expected=known,
            number=cursor.number,
            seq=cursor.seq,
        )
        try:
            answer = dataflow.incarnate(policy, request)
            break
        except Conflict as error:
            if dataflow.state(policy).incarnation != known:
                continue
            newest = checkpoints.open_newest()
            if newest is None or newest.cursor == cursor:  # else the one before went on meanwhile
                raise _refused(policy, checkpoint, error) from error
    _log.info(
        "trainer took over",
        policy=policy,
        incarnation=answer.incarnation,
        number=cursor.number,
        seq=cursor.seq,
        steps=answer.steps,
    )
    return Takeover(checkpoint=checkpoint, incarnation=answer.incarnation)


def _refused(policy: PolicyName, checkpoint: Checkpoint, error: Conflict) -> ResumeRejected:
    cursor = checkpoint.cursor
    where = f"{checkpoint.folder}, number {cursor.number}, batch {cursor.seq}"
    message = f"{policy}: the ledger refuses to resume from {where}: {error}"
    if isinstance(error, UnknownCommit):
        message += (
            "\n  it is the ledger of another run, or an older copy of this one. Restore the "
            "one that belongs to this checkpoint; or move the checkpoint away, and what was "
            "trained since the previous one is trained again"
        )
    return ResumeRejected(message)
