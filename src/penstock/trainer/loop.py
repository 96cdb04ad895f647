# SPDX-License-Identifier: Apache-2.0
"""The trainer's loop: batches in, versions out.

Owns the order of calls that makes training exactly-once: commit before publish, the restore point
published before the first batch, the cursor inside the checkpoint, and the ledger told of it when
it is complete. A crash at any point loses nothing: the next life restores the newest checkpoint,
takes a new incarnation at its cursor, and the same sealed batches come again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol

import structlog

from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CheckpointsRequest,
    CommitRequest,
    IncarnationAnswer,
    IncarnationRequest,
    PolicyState,
    PublishRequest,
    QuarantineRequest,
    UsedBy,
    VersionsInUse,
)
from penstock.errors import Conflict, Fenced, ForkRefused, NeverCommitted
from penstock.observe.metrics import MetricsFile
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.checkpoint import Checkpoints
from penstock.trainer.checkpoint_saver import Saver
from penstock.trainer.durable_files import new_token
from penstock.trainer.learner import Stats
from penstock.trainer.models import Crew
from penstock.trainer.publisher import Publisher
from penstock.trainer.ranks.group import Alone, Team
from penstock.trainer.ranks.row_fetch import draw_rows
from penstock.trainer.ranks.worker_loop import Order, Served, num_ranks, say
from penstock.trainer.signals.mismatch import Drifting
from penstock.trainer.signals.monitor import Watch
from penstock.trainer.signals.monitor_state import from_json, to_json
from penstock.trainer.snapshots import Snapshots
from penstock.types import NodeId, PolicyName
from penstock.weights.publish import StoredVersion

_log = structlog.get_logger(__name__)


POLL_S = 5.0
"""A trainer that is told to stop while it waits for a batch goes on waiting no longer than this."""
SAY_S = 1.0
"""How long the other ranks hear nothing while a checkpoint is waited for."""


class Batches(Served, Protocol):
    """Sealed batches and what became of them."""

    def commit(self, policy: PolicyName, seq: int, body: CommitRequest) -> None: ...


class Versions(Protocol):
    """Who trains a policy, and what it has published."""

    def state(self, policy: PolicyName) -> PolicyState: ...

    def incarnate(self, policy: PolicyName, body: IncarnationRequest) -> IncarnationAnswer: ...

    def publish(self, policy: PolicyName, body: PublishRequest) -> None: ...

    def checkpoints(self, policy: PolicyName, body: CheckpointsRequest) -> None: ...

    def versions_in_use(self) -> VersionsInUse: ...


class Nodes(Protocol):
    """Those who made what it trains on."""

    def quarantine(self, node_id: NodeId, body: QuarantineRequest) -> None: ...


class Dataflow(Batches, Versions, Nodes, Protocol):
    """All that a trainer asks of the dataflow."""


class Trainer:
    """One life of one policy's trainer."""

    def __init__(
        self,
        *,
        policy: PolicyName,
        crew: Crew,
        dataflow: Dataflow,
        snapshots: Snapshots,
        checkpoints: Checkpoints,
        metrics: MetricsFile,
        is_stopping: Callable[[], bool] = lambda: False,
        team: Team | None = None,
        publishes_all: bool = False,
    ) -> None:
        """publishes_all: no number is left out when publishing lags; the training waits for it."""
        self._policy = policy
        self._crew = crew
        self._team = team or Alone()
        self._dataflow = dataflow
        self._snapshots = snapshots
        self._publisher = Publisher(snapshots, self._announce, self._versions_in_use)
        self._checkpoints = checkpoints
        self._saver = Saver(
            checkpoints,
            permit=self._refuse_if_replaced,
            tell=self._name_checkpoints,
            num_ranks=num_ranks(self._team),
        )
        self._metrics = metrics
        self._watch = Watch(self._quarantine, from_json(checkpoints.last.state.memory))
        self._is_stopping = is_stopping
        self._publishes_all = publishes_all
        self._has_ended = False
        self._cursor = checkpoints.last.cursor
        self._have_others_learned = False
        """Since the last checkpoint, in which case its number alone does not tell its state."""
        self._seconds: dict[str, float] = {}

    def run(self) -> bool:
        """Train to the end (True), or until told to stop (False).

        consumes: sealed batches · produces: commits, versions, checkpoints
        waits for: the next batch · ends: when no batch will follow, when it is told to stop (after
        its step, with a checkpoint), or when it is fenced"""
        try:
            self._take_over()
            self._publish()
            self._publisher.finish()
            for batch in self._batches():
                stats = self._crew.step(batch)
                self._commit(batch, stats)
                if stats.skipped is None:
                    self._publish()
                if self._saver.is_due(self._cursor):
                    self._save()
            self._publisher.finish()
            self._save()
            self._finish_saving()
            say(self._team, Order.LEAVE)
        finally:
            self._publisher.close()
            self._saver.close()
        return self._has_ended

    def _take_over(self) -> None:
        """Become the policy's one trainer, forking at the cursor of the restored checkpoint."""
        while True:
            known = self._dataflow.state(self._policy).incarnation
            request = IncarnationRequest(
                request_id=secrets.token_hex(16),
                expected=known,
                number=self._cursor.number,
                seq=self._cursor.seq,
            )
            try:
                answer = self._dataflow.incarnate(self._policy, request)
                break
            except Conflict as error:
                if self._dataflow.state(self._policy).incarnation == known:
                    raise self._refused(error) from error
        self._cursor = replace(self._cursor, incarnation=answer.incarnation)
        self._snapshots.remove_others()
        self._name_checkpoints()
        _log.info(
            "trainer took over",
            policy=self._policy,
            incarnation=answer.incarnation,
            number=self._cursor.number,
            seq=self._cursor.seq,
            steps=answer.steps,
        )

    def _refused(self, error: Conflict) -> ForkRefused:
        where = f"{self._checkpoints.last.folder}, number {self._cursor.number}, batch"
        told = (
            f"{self._policy}: the ledger refuses to go on from {where} {self._cursor.seq}: {error}"
        )
        if isinstance(error, NeverCommitted):
            told += (
                "\n  it is the ledger of another run, or an older copy of this one. Bring back the "
                "one that belongs to this checkpoint; or move the checkpoint away, and what was "
                "trained since the one before it is trained anew"
            )
        return ForkRefused(told)

    def _batches(self) -> Iterator[Batch]:
        """Each sealed batch after the cursor, until there is no more."""
        asked_at = time.perf_counter()
        while not self._is_stopping():
            request = BatchRequest(
                consumer=self._policy,
                seq=self._cursor.seq + 1,
                incarnation=self._cursor.incarnation,
                wait_s=POLL_S,
            )
            answer = self._dataflow.batch(request)
            if answer.checkpoint_now:
                self._save()
            if answer.end:
                self._has_ended = True
                return
            if answer.manifest is None:
                say(self._team, Order.WAIT)
                continue
            came_at = time.perf_counter()
            say(self._team, Order.TRAIN, request.seq, request.incarnation)
            rows = draw_rows(
                self._dataflow, answer.manifest, self._team, minibatches=self._crew.minibatches
            )
            batch = assemble(
                answer.manifest, rows, self._policy, self._crew.vocab_size, ranks=self._team
            )
            self._seconds["wait"] = came_at - asked_at
            self._seconds["read"] = time.perf_counter() - came_at
            yield batch
            asked_at = time.perf_counter()

    def _commit(self, batch: Batch, stats: Stats) -> None:
        trained = stats.skipped is None
        cursor = replace(
            self._cursor, seq=batch.seq, number=self._cursor.number + (1 if trained else 0)
        )
        seconds = {f"seconds/{what}": value for what, value in self._seconds.items()}
        values = {**stats.values, **seconds}
        values["seconds"] = values["seconds/read"] + values["seconds/train"]
        body = CommitRequest(
            incarnation=cursor.incarnation,
            number=cursor.number,
            skipped=stats.skipped or "",
            stats=values,
        )
        self._dataflow.commit(self._policy, batch.seq, body)
        self._cursor = cursor
        self._have_others_learned |= stats.others_learned
        alarm = self._watch.see(batch.seq, stats)
        self._metrics.append(
            {
                "policy": self._policy,
                "number": cursor.number,
                "seq": cursor.seq,
                "incarnation": cursor.incarnation,
                "skipped": body.skipped,
                **({"alarm": alarm} if alarm else {}),
                **values,
            }
        )
        if not trained:
            _log.warning("batch skipped", policy=self._policy, seq=batch.seq, why=body.skipped)

    def _quarantine(self, node: Drifting) -> None:
        body = QuarantineRequest(
            policy=self._policy,
            incarnation=self._cursor.incarnation,
            why=str(node),
            session=node.session,
        )
        self._dataflow.quarantine(node.node_id, body)

    def _publish(self) -> None:
        started = time.perf_counter()
        say(self._team, Order.WEIGHTS)
        self._publisher.hand_over(self._crew.weights(), self._cursor.number)
        if self._publishes_all:
            self._publisher.finish()
        self._seconds["publish"] = time.perf_counter() - started

    def _announce(self, number: int, stored: StoredVersion) -> None:
        body = PublishRequest(
            incarnation=self._cursor.incarnation,
            number=number,
            manifest_digest=stored.manifest_digest,
            weights_digest=stored.weights_digest,
        )
        self._dataflow.publish(self._policy, body)

    def _versions_in_use(self) -> tuple[list[str], list[str]]:
        versions = self._dataflow.versions_in_use().versions
        newest = [found.manifest_digest for found in versions if found.by is UsedBy.NEWEST]
        return [found.manifest_digest for found in versions], newest

    def _save(self) -> None:
        """Hand over a copy of everything the next step depends on, each rank its own share; where
        nothing of it has changed since the last time, the cursor alone."""
        started = time.perf_counter()
        self._finish_saving()
        last = self._checkpoints.last.cursor
        if last == self._cursor:
            return
        if last.number == self._cursor.number and not self._have_others_learned:
            self._saver.move(self._cursor, to_json(self._watch.memory))
        else:
            self._save_all()
        self._seconds["checkpoint"] = time.perf_counter() - started

    def _save_all(self) -> None:
        token = new_token()
        say(self._team, Order.WEIGHTS)
        weights = self._crew.weights()
        say(self._team, Order.STATE, token)
        state = self._crew.state_tensors()
        self._saver.hand_over(
            self._cursor,
            weights=weights,
            state=state,
            static=self._snapshots.static,
            token=token,
            memory=to_json(self._watch.memory),
        )
        self._have_others_learned = False

    def _finish_saving(self) -> None:
        """Wait for the checkpoint being written, not in silence: a rank that could not write its
        share hears the next word, and ends us all."""
        while not self._saver.finish(SAY_S):
            say(self._team, Order.WAIT)

    def _refuse_if_replaced(self) -> None:
        """A trainer may have slept for long before it saves: its successor's folders are not ours.

        Saving removes older checkpoints, and no fenced call stands between a stop and the save."""
        incarnation = self._dataflow.state(self._policy).incarnation
        if incarnation != self._cursor.incarnation:
            raise Fenced(
                f"incarnation {self._cursor.incarnation} of {self._policy} was replaced by "
                f"{incarnation}; no checkpoint is saved"
            )

    def _name_checkpoints(self) -> None:
        """Tell the ledger what could be restored, so that it keeps the rows after the oldest."""
        # Without any, the initial model is what a successor would restore.
        retained = self._checkpoints.retained or ((0, 0),)
        body = CheckpointsRequest(incarnation=self._cursor.incarnation, retained=retained)
        self._dataflow.checkpoints(self._policy, body)
