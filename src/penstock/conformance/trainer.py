# SPDX-License-Identifier: Apache-2.0
"""Checks every call of a trainer under test against the protocol.

Owns the rules for trainers and the faults they must survive: a batch that is not ready yet, a
commit that is durable but answered with 503, a successor. The caller provides the rows.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from penstock.conformance.dataflow_double import POLICY, DataflowDouble, Handler
from penstock.conformance.verdicts import Rule, RuleVerdicts
from penstock.conformance.version_rules import (
    damaged_files,
    digest_problem,
    identity_problem,
    missing_blobs,
    read_manifest,
)
from penstock.dataflow.service.process import MAX_WAIT_S
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
)
from penstock.errors import Fenced, Unreachable
from penstock.wire.routes import Call

NUM_BATCHES = 3
"""Batches that the trainer gets before a successor replaces it."""
CHECKPOINT_AT = 2
"""The batch whose response requests a checkpoint."""

RULES = (
    Rule("look-before-incarnation", "a new incarnation names the one last read from the state"),
    Rule("incarnation-on-calls", "every call has the incarnation that the trainer was given"),
    Rule("restore-point-first", "the restore point (initially number 0) is published first"),
    Rule("store-before-publish", "manifest and blobs are in the store before publication"),
    Rule("digests-right", "manifest, blobs, tensors and weights match their digests"),
    Rule("publish-committed", "only committed numbers are published"),
    Rule("versions-published", "each committed number is published"),
    Rule("batches-in-order", "batches are requested as 1, 2, 3, …, and again if not ready"),
    Rule("rows-before-commit", "all rows of a batch are fetched before its commit"),
    Rule("commits-in-order", "each batch once, in order, with number + 1 or a reason to skip"),
    Rule("commit-repeated", "after 503 the same commit is sent again"),
    Rule("checkpoints-named", "on request, a checkpoint of a committed state is reported"),
    Rule("store-append-only", "nothing in the store is ever overwritten"),
    Rule("fenced-stops", "after 409 fenced, no calls except reading the state"),
)


class TrainerExaminer:
    def __init__(self, double: DataflowDouble) -> None:
        self.verdicts = RuleVerdicts(RULES)
        self.last_call_at = time.monotonic()
        self.num_batch_requests = 0
        self.last_requested = 0
        self.fenced_at = 0.0
        self.superseded = asyncio.Event()
        """Set when a successor has taken over."""
        self._store = double.store
        self._seen_incarnation: int | None = None
        self._incarnation = 0
        self._number = 0
        self._seq = 0
        self._published: set[int] = set()
        self._committed: set[tuple[int, int]] = {(0, 0)}
        self._last_served = 0
        self._pending_batch: int | None = None
        """The requested batch that was not ready."""
        self._unfetched_rows: dict[int, set[int]] = {}
        """Indexes of the rows not fetched yet, by batch."""
        self._refused: tuple[int, CommitRequest] | None = None
        self._has_refused = False

    @property
    def is_settled(self) -> bool:
        """Whether everything that should follow the last commit has arrived."""
        return self._number in self._published and self.verdicts.has_result("checkpoints-named")

    # --- calls --------------------------------------------------------------------------------

    async def __call__(self, name: str, call: Call, handler: Handler) -> object:
        self.last_call_at = time.monotonic()
        examine = {
            "GET /v1/policies/{policy}": self._read_state,
            "POST /v1/policies/{policy}/incarnations": self._incarnate,
            "POST /v1/policies/{policy}/versions": self._publish,
            "PUT /v1/policies/{policy}/checkpoints": self._checkpoints,
            "POST /v1/batches": self._batch,
            "POST /v1/batches/{batch_id}/rows": self._rows,
            "POST /v1/batches/{batch_id}/commit": self._commit,
        }.get(name)
        if examine is None:
            return await handler(call)
        if self.fenced_at and examine != self._read_state:
            self.verdicts.mark_broken("fenced-stops", f"{name} after 409 fenced")
        try:
            return await examine(call, handler)
        except Fenced:
            if self.superseded.is_set() and not self.fenced_at:
                self.fenced_at = time.monotonic()
                self.verdicts.mark_kept("fenced-stops")
            raise

    async def _read_state(self, call: Call, handler: Handler) -> object:
        answer = await handler(call)
        assert isinstance(answer, PolicyState)
        self._seen_incarnation = answer.incarnation
        return answer

    async def _incarnate(self, call: Call, handler: Handler) -> object:
        body: IncarnationRequest = call.body
        is_seen = body.expected == self._seen_incarnation
        detail = f"expected={body.expected}, but the state last read has {self._seen_incarnation}"
        if not self.fenced_at:
            self.verdicts.check("look-before-incarnation", is_seen, detail)
        answer = await handler(call)
        assert isinstance(answer, IncarnationAnswer)
        if not self.fenced_at:
            self._incarnation = answer.incarnation
        return answer

    def _check_incarnation(self, incarnation: int, what: str) -> None:
        is_given = incarnation == self._incarnation > 0
        detail = f"{what} with incarnation {incarnation}, but it was given {self._incarnation}"
        self.verdicts.check("incarnation-on-calls", is_given, detail)

    # --- versions -----------------------------------------------------------------------------

    async def _publish(self, call: Call, handler: Handler) -> object:
        body: PublishRequest = call.body
        self._check_incarnation(body.incarnation, "publish")
        if not self._published:
            detail = f"number {body.number} was published first"
            self.verdicts.check("restore-point-first", body.number == 0, detail)
        detail = f"number {body.number} published, but only {self._number} is committed"
        self.verdicts.check("publish-committed", body.number <= self._number, detail)
        self._check_store(body)
        answer = await handler(call)
        self._published.add(body.number)
        return answer

    def _check_store(self, body: PublishRequest) -> None:
        try:
            manifest = read_manifest(self._store, body.manifest_digest)
        except FileNotFoundError:
            detail = f"number {body.number}: no manifest {body.manifest_digest} in the store"
            self.verdicts.mark_broken("store-before-publish", detail)
            return
        if isinstance(manifest, str):
            self.verdicts.mark_broken("digests-right", f"number {body.number}: {manifest}")
            return
        missing = missing_blobs(self._store, manifest)
        detail = f"number {body.number}: no blob for {', '.join(missing)} in the store"
        self.verdicts.check("store-before-publish", not missing, detail)
        if not missing:
            wrong = identity_problem(manifest, POLICY, body)
            wrong = wrong or digest_problem(self._store, manifest)
            self.verdicts.check("digests-right", not wrong, f"number {body.number}: {wrong}")

    async def _checkpoints(self, call: Call, handler: Handler) -> object:
        body: CheckpointsRequest = call.body
        self._check_incarnation(body.incarnation, "checkpoints")
        unknown = [point for point in body.retained if point not in self._committed]
        if unknown:
            detail = f"{unknown[0]} is not a committed (number, seq)"
            self.verdicts.mark_broken("checkpoints-named", detail)
        elif any(seq > 0 for _, seq in body.retained):
            self.verdicts.mark_kept("checkpoints-named")
        return await handler(call)

    # --- batches ------------------------------------------------------------------------------

    async def _batch(self, call: Call, handler: Handler) -> object:
        body: BatchRequest = call.body
        self._check_incarnation(body.incarnation, "batch")
        if not self._published:
            self.verdicts.mark_broken("restore-point-first", "a batch was requested before it")
        expected = (
            (self._last_served + 1,) if self._pending_batch else (self._last_served, self._seq + 1)
        )
        detail = f"requested batch {body.seq} after batch {self._last_served}"
        if body.seq not in expected:
            self.verdicts.mark_broken("batches-in-order", detail)
        elif self._pending_batch:
            self.verdicts.mark_kept("batches-in-order")
        self.num_batch_requests += 1
        self.last_requested = max(self.last_requested, body.seq)
        if self.num_batch_requests == 1:
            self._pending_batch = body.seq
            return BatchAnswer(manifest=None)
        if body.seq > NUM_BATCHES:
            await self._until_superseded(body.wait_s)
        answer = await handler(call)
        assert isinstance(answer, BatchAnswer)
        self._pending_batch = None
        if answer.manifest is None:
            self._pending_batch = body.seq
            return answer
        self._last_served = max(self._last_served, body.seq)
        indexes = {index for index, _ in enumerate(answer.manifest.rows)}
        self._unfetched_rows.setdefault(body.seq, indexes)
        return replace(answer, checkpoint_now=body.seq == CHECKPOINT_AT)

    async def _until_superseded(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
                await self.superseded.wait()

    async def _rows(self, call: Call, handler: Handler) -> object:
        answer = await handler(call)
        seq = _seq_of(call)
        body: BatchRowsRequest = call.body
        unread = self._unfetched_rows.setdefault(seq, set())
        unread -= unread if body.indexes is None else {*body.indexes}
        return answer

    async def _commit(self, call: Call, handler: Handler) -> object:
        body: CommitRequest = call.body
        seq = _seq_of(call)
        self._check_incarnation(body.incarnation, "commit")
        if self._refused is not None:
            refused, self._refused = self._refused, None
            detail = f"sent {body} for batch {seq} after {refused[1]} for batch {refused[0]}"
            self.verdicts.check("commit-repeated", refused == (seq, body), detail)
        if seq == self._seq and (body.number, seq) in self._committed:
            return await handler(call)
        self._check_commit(seq, body)
        answer = await handler(call)
        self._seq, self._number = seq, body.number
        self._committed.add((body.number, seq))
        if not self._has_refused:
            self._has_refused, self._refused = True, (seq, body)
            raise Unreachable("conformance: injected fault, it is committed", retry_after_s=0.1)
        return answer

    def _check_commit(self, seq: int, body: CommitRequest) -> None:
        number = self._number if body.skipped else self._number + 1
        is_due = (seq, body.number) == (self._seq + 1, number)
        detail = (
            f"committed batch {seq} as number {body.number} after batch {self._seq} as number "
            f"{self._number}"
        )
        self.verdicts.check("commits-in-order", is_due, detail)
        is_read = not self._unfetched_rows.get(seq, {0})
        if not body.skipped:
            detail = f"not all rows of batch {seq} were fetched"
            self.verdicts.check("rows-before-commit", is_read, detail)

    # --- the end ------------------------------------------------------------------------------

    def finish(self) -> None:
        """Mark rules as broken whose expected calls never came."""
        if self._number:
            missing = set(range(self._number + 1)) - self._published
            detail = f"number {min(missing, default=0)} was committed but never published"
            self.verdicts.check("versions-published", not missing, detail)
        if self._seq >= NUM_BATCHES and not self.verdicts.has_result("checkpoints-named"):
            self.verdicts.mark_broken(
                "checkpoints-named", "no checkpoint was reported after the request"
            )
        if self._refused is not None:
            self.verdicts.mark_broken(
                "commit-repeated", f"the commit of batch {self._refused[0]} was not sent again"
            )
        if self._published:
            damaged = damaged_files(self._store)
            self.verdicts.check("store-append-only", not damaged, f"{damaged[:1]} was changed")


def _seq_of(call: Call) -> int:
    """0 for an invalid batch id, which the real handler then rejects."""
    seq = call.path["batch_id"].rpartition(".")[2]
    return int(seq) if seq.isdecimal() else 0
