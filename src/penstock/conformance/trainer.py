# SPDX-License-Identifier: Apache-2.0
"""A trainer under test: every call it makes, held against the contract.

Owns the rules of the trainer's side and the mishaps it must survive: a batch that is not there yet,
a commit that is durable and answered 503, a successor. Who feeds it, its caller decides.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from penstock.conformance.dataflow_double import POLICY, Double, Handler
from penstock.conformance.verdicts import Findings, Rule
from penstock.conformance.version_rules import (
    damaged_files,
    missing_blobs,
    read_manifest,
    wrong_digest,
    wrong_name,
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
"""Batches it may train before somebody takes its place."""
CHECKPOINT_AT = 2
"""The batch whose answer asks for a checkpoint."""

RULES = (
    Rule("look-before-incarnation", "the current incarnation is read, then asked to be succeeded"),
    Rule("incarnation-on-calls", "every call carries the incarnation it was given, none before"),
    Rule("restore-point-first", "the restore point (number 0 at first) is published first"),
    Rule("store-before-publish", "manifest and blobs are in the store before the publication"),
    Rule(
        "digests-right", "manifest, blobs, tensors and weights have the digests they are named by"
    ),
    Rule("publish-committed", "only committed numbers are published"),
    Rule("versions-published", "each committed number is published"),
    Rule("batches-in-order", "batches are asked for as 1, 2, 3, …, again while there is none"),
    Rule("rows-before-commit", "all rows of a batch are fetched before its commit"),
    Rule("commits-in-order", "each batch once, in order, with number + 1 or a reason to skip"),
    Rule("commit-repeated", "after 503 the same commit comes again"),
    Rule("checkpoints-named", "when asked for, a checkpoint of a committed state is named"),
    Rule("store-append-only", "nothing in the store is ever overwritten"),
    Rule("fenced-stops", "after 409 fenced no call follows but a look at the state"),
)


class TrainerWatch:
    def __init__(self, double: Double) -> None:
        self.findings = Findings(RULES)
        self.last_call_at = time.monotonic()
        self.num_asked = 0
        self.last_asked = 0
        self.fenced_at = 0.0
        self.succeeded = asyncio.Event()
        """Somebody else is the trainer now."""
        self._store = double.store
        self._seen_incarnation: int | None = None
        self._incarnation = 0
        self._number = 0
        self._seq = 0
        self._published: set[int] = set()
        self._committed: set[tuple[int, int]] = {(0, 0)}
        self._last_served = 0
        self._awaited: int | None = None
        """The batch that was not there yet when it was asked for."""
        self._unread: dict[int, set[int]] = {}
        """Places of the rows that were not fetched yet, by batch."""
        self._refused: tuple[int, CommitRequest] | None = None
        self._has_refused = False

    @property
    def is_settled(self) -> bool:
        """All that should follow the last commit has come."""
        return self._number in self._published and self.findings.has_seen("checkpoints-named")

    # --- calls --------------------------------------------------------------------------------

    async def __call__(self, name: str, call: Call, handler: Handler) -> object:
        self.last_call_at = time.monotonic()
        watch = {
            "GET /v1/policies/{policy}": self._look,
            "POST /v1/policies/{policy}/incarnations": self._incarnate,
            "POST /v1/policies/{policy}/versions": self._publish,
            "PUT /v1/policies/{policy}/checkpoints": self._checkpoints,
            "POST /v1/batches": self._batch,
            "POST /v1/batches/{batch_id}/rows": self._rows,
            "POST /v1/batches/{batch_id}/commit": self._commit,
        }.get(name)
        if watch is None:
            return await handler(call)
        if self.fenced_at and watch != self._look:
            self.findings.broke("fenced-stops", f"{name} after 409 fenced")
        try:
            return await watch(call, handler)
        except Fenced:
            if self.succeeded.is_set() and not self.fenced_at:
                self.fenced_at = time.monotonic()
                self.findings.kept("fenced-stops")
            raise

    async def _look(self, call: Call, handler: Handler) -> object:
        answer = await handler(call)
        assert isinstance(answer, PolicyState)
        self._seen_incarnation = answer.incarnation
        return answer

    async def _incarnate(self, call: Call, handler: Handler) -> object:
        body: IncarnationRequest = call.body
        is_seen = body.expected == self._seen_incarnation
        seen = f"expected {body.expected}, the last look said {self._seen_incarnation}"
        if not self.fenced_at:
            self.findings.check("look-before-incarnation", is_seen, seen)
        answer = await handler(call)
        assert isinstance(answer, IncarnationAnswer)
        if not self.fenced_at:
            self._incarnation = answer.incarnation
        return answer

    def _check_incarnation(self, incarnation: int, what: str) -> None:
        is_given = incarnation == self._incarnation > 0
        seen = f"{what} under incarnation {incarnation}, it was given {self._incarnation}"
        self.findings.check("incarnation-on-calls", is_given, seen)

    # --- versions -----------------------------------------------------------------------------

    async def _publish(self, call: Call, handler: Handler) -> object:
        body: PublishRequest = call.body
        self._check_incarnation(body.incarnation, "publish")
        if not self._published:
            seen = f"number {body.number} is published first"
            self.findings.check("restore-point-first", body.number == 0, seen)
        seen = f"number {body.number} while {self._number} is committed"
        self.findings.check("publish-committed", body.number <= self._number, seen)
        self._check_store(body)
        answer = await handler(call)
        self._published.add(body.number)
        return answer

    def _check_store(self, body: PublishRequest) -> None:
        try:
            manifest = read_manifest(self._store, body.manifest_digest)
        except FileNotFoundError:
            seen = f"number {body.number}: no manifest {body.manifest_digest}"
            self.findings.broke("store-before-publish", seen)
            return
        if isinstance(manifest, str):
            self.findings.broke("digests-right", f"number {body.number}: {manifest}")
            return
        missing = missing_blobs(self._store, manifest)
        seen = f"number {body.number}: no blob of {', '.join(missing)}"
        self.findings.check("store-before-publish", not missing, seen)
        if not missing:
            wrong = wrong_name(manifest, POLICY, body) or wrong_digest(self._store, manifest)
            self.findings.check("digests-right", not wrong, f"number {body.number}: {wrong}")

    async def _checkpoints(self, call: Call, handler: Handler) -> object:
        body: CheckpointsRequest = call.body
        self._check_incarnation(body.incarnation, "checkpoints")
        unknown = [point for point in body.retained if point not in self._committed]
        if unknown:
            seen = f"{unknown[0]} is no (number, seq) it committed"
            self.findings.broke("checkpoints-named", seen)
        elif any(seq > 0 for _, seq in body.retained):
            self.findings.kept("checkpoints-named")
        return await handler(call)

    # --- batches ------------------------------------------------------------------------------

    async def _batch(self, call: Call, handler: Handler) -> object:
        body: BatchRequest = call.body
        self._check_incarnation(body.incarnation, "batch")
        if not self._published:
            self.findings.broke("restore-point-first", "a batch is asked for before it")
        due = (self._last_served + 1,) if self._awaited else (self._last_served, self._seq + 1)
        seen = f"batch {body.seq} asked for, {self._last_served} was the last"
        if body.seq not in due:
            self.findings.broke("batches-in-order", seen)
        elif self._awaited:
            self.findings.kept("batches-in-order")
        self.num_asked += 1
        self.last_asked = max(self.last_asked, body.seq)
        if self.num_asked == 1:
            self._awaited = body.seq
            return BatchAnswer(manifest=None)
        if body.seq > NUM_BATCHES:
            await self._until_succeeded(body.wait_s)
        answer = await handler(call)
        assert isinstance(answer, BatchAnswer)
        self._awaited = None
        if answer.manifest is None:
            self._awaited = body.seq
            return answer
        self._last_served = max(self._last_served, body.seq)
        self._unread.setdefault(body.seq, {place for place, _ in enumerate(answer.manifest.rows)})
        return replace(answer, checkpoint_now=body.seq == CHECKPOINT_AT)

    async def _until_succeeded(self, wait_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(min(wait_s, MAX_WAIT_S)):
                await self.succeeded.wait()

    async def _rows(self, call: Call, handler: Handler) -> object:
        answer = await handler(call)
        seq = _seq_of(call)
        body: BatchRowsRequest = call.body
        unread = self._unread.setdefault(seq, set())
        unread -= unread if body.indexes is None else {*body.indexes}
        return answer

    async def _commit(self, call: Call, handler: Handler) -> object:
        body: CommitRequest = call.body
        seq = _seq_of(call)
        self._check_incarnation(body.incarnation, "commit")
        if self._refused is not None:
            refused, self._refused = self._refused, None
            seen = f"after {refused[1]} of batch {refused[0]} came {body} of batch {seq}"
            self.findings.check("commit-repeated", refused == (seq, body), seen)
        if seq == self._seq and (body.number, seq) in self._committed:
            return await handler(call)
        self._check_commit(seq, body)
        answer = await handler(call)
        self._seq, self._number = seq, body.number
        self._committed.add((body.number, seq))
        if not self._has_refused:
            self._has_refused, self._refused = True, (seq, body)
            raise Unreachable("conformance: committed, but you do not know", retry_after_s=0.1)
        return answer

    def _check_commit(self, seq: int, body: CommitRequest) -> None:
        number = self._number if body.skipped else self._number + 1
        is_due = (seq, body.number) == (self._seq + 1, number)
        seen = (
            f"batch {seq} as number {body.number} after batch {self._seq} as number {self._number}"
        )
        self.findings.check("commits-in-order", is_due, seen)
        is_read = not self._unread.get(seq, {0})
        if not body.skipped:
            self.findings.check("rows-before-commit", is_read, f"batch {seq} was not read whole")

    # --- the end ------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Name what should have come and did not."""
        if self._number:
            missing = set(range(self._number + 1)) - self._published
            seen = f"number {min(missing, default=0)} was committed and never published"
            self.findings.check("versions-published", not missing, seen)
        if self._seq >= NUM_BATCHES and not self.findings.has_seen("checkpoints-named"):
            self.findings.broke("checkpoints-named", "none was named, though one was asked for")
        if self._refused is not None:
            self.findings.broke("commit-repeated", f"batch {self._refused[0]} never came again")
        if self._published:
            damaged = damaged_files(self._store)
            self.findings.check("store-append-only", not damaged, f"{damaged[:1]} was changed")


def _seq_of(call: Call) -> int:
    """0 for what is no batch id; the service's own handler refuses that."""
    seq = call.path["batch_id"].rpartition(".")[2]
    return int(seq) if seq.isdecimal() else 0
