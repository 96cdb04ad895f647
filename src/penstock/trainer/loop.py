# SPDX-License-Identifier: Apache-2.0
"""The trainer's loop: batches in, versions out.

Owns the order of calls that makes training exactly-once: commit before publish, the restore point
published before the first batch, the cursor inside the checkpoint, and the checkpoint reported to
the ledger once it is complete. A crash at any point loses nothing: the next process restores the
newest checkpoint, takes a new incarnation at its cursor (`takeover`), and receives the same sealed
batches again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Protocol

import structlog

from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CheckpointsRequest,
    CommitRequest,
    PolicyState,
    PublishRequest,
    QuarantineRequest,
    RowsAnswer,
    VersionsInUse,
    VersionUser,
)
from penstock.errors import Fenced
from penstock.observe.metrics import MetricsFile
from penstock.trainer.batches import Batch
from penstock.trainer.checkpoint import Checkpoints
from penstock.trainer.checkpoint_saver import Saver
from penstock.trainer.durable_files import new_token
from penstock.trainer.learner import Stats
from penstock.trainer.models import Models
from penstock.trainer.publisher import Publisher
from penstock.trainer.ranks.group import Ranks, SingleRank
from penstock.trainer.ranks.row_fetch import fetch_rows
from penstock.trainer.ranks.worker_loop import BatchSource, RankOrder, broadcast_order, num_ranks
from penstock.trainer.signals.mismatch import DriftingNode
from penstock.trainer.signals.monitor import SignalMonitor, from_json, to_json
from penstock.trainer.snapshots import Snapshots
from penstock.types import Manifest, NodeId, PolicyName, RowPayload
from penstock.weights.publish import StoredVersion

_log = structlog.get_logger(__name__)


POLL_S = 5.0
"""Longest wait for a batch in one request, and so the delay before a stop takes effect."""
KEEPALIVE_S = 1.0
"""Seconds between keepalives to the other ranks while waiting for a checkpoint."""


class Versions(Protocol):
    """The published versions of a policy."""

    def state(self, policy: PolicyName) -> PolicyState: ...

    def publish(self, policy: PolicyName, body: PublishRequest) -> None: ...

    def checkpoints(self, policy: PolicyName, body: CheckpointsRequest) -> None: ...

    def versions_in_use(self) -> VersionsInUse: ...


class TrainerDataflow(BatchSource, Versions, Protocol):
    """Everything a trainer requests from the dataflow."""

    def commit(self, policy: PolicyName, seq: int, body: CommitRequest) -> None: ...

    def quarantine(self, node_id: NodeId, body: QuarantineRequest) -> None: ...

    def instalment_rows(self, policy: PolicyName, seq: int, instalment: int) -> RowsAnswer: ...


class Trainer:
    """One policy's trainer, from start to exit of its process."""

    def __init__(
        self,
        *,
        policy: PolicyName,
        models: Models,
        dataflow: TrainerDataflow,
        snapshots: Snapshots,
        checkpoints: Checkpoints,
        incarnation: int,
        metrics: MetricsFile,
        is_stopping: Callable[[], bool] = lambda: False,
        ranks: Ranks | None = None,
        publish_every_version: bool = False,
        roles: Collection[str] = (),
    ) -> None:
        """incarnation: this trainer's, forked at the last checkpoint, as `take_over` gave it.
        publish_every_version: training waits if publishing falls behind, and skips no number.
        roles: of the run file."""
        self._policy = policy
        self._models = models
        self._ranks = ranks or SingleRank()
        self._dataflow = dataflow
        self._snapshots = snapshots
        self._publisher = Publisher(
            snapshots,
            self._announce,
            self._versions_in_use,
            num_ranks=num_ranks(self._ranks),
        )
        self._checkpoints = checkpoints
        self._saver = Saver(
            checkpoints,
            check_allowed=self._check_not_replaced,
            on_saved=self._report_checkpoints,
            num_ranks=num_ranks(self._ranks),
        )
        self._metrics = metrics
        self._monitor = SignalMonitor(
            self._quarantine, from_json(checkpoints.last.state.monitor_state), roles
        )
        self._is_stopping = is_stopping
        self._publishes_all = publish_every_version
        self._has_ended = False
        self._cursor = replace(checkpoints.last.cursor, incarnation=incarnation)
        self._other_models_updated = False
        """Since the last checkpoint; if so, its number alone does not identify its state."""
        self._seconds: dict[str, float] = {}

    def run(self) -> bool:
        """Train to the end (True), or until stopped (False).

        consumes: sealed batches · produces: commits, versions, checkpoints · waits for: the next
        batch
        ends: when no batch will follow, when it is stopped (after its step, with a checkpoint), or
        fenced"""
        try:
            self._snapshots.remove_stale_folders()
            self._report_checkpoints()
            self._publish()
            self._flush(self._publisher)
            for seq, stats in self._steps():
                self._commit(seq, stats)
                if stats.skipped is None:
                    self._publish()
                if self._saver.is_due(self._cursor):
                    self._save()
            self._flush(self._publisher)
            self._save()
            self._flush(self._saver)
            broadcast_order(self._ranks, RankOrder.EXIT)
        finally:
            self._publisher.close()
            self._saver.close()
        return self._has_ended

    def _steps(self) -> Iterator[tuple[int, Stats]]:
        """Train on each sealed batch after the cursor, until there are no more."""
        step = self._streamed_step if self._models.is_streamed else self._step
        while (stats := step(self._cursor.seq + 1)) is not None:
            yield self._cursor.seq + 1, stats

    def _step(self, seq: int) -> Stats | None:
        """Train on this batch; None: there is none, or this trainer is stopping."""
        self._seconds["wait"] = self._seconds["read"] = 0.0
        found = self._wait_for(seq)
        if found is None:
            return None
        manifest, _ = found
        broadcast_order(self._ranks, RankOrder.TRAIN, seq, self._cursor.incarnation)
        return self._models.step(self._assemble(manifest, self._fetch))

    def _streamed_step(self, seq: int) -> Stats | None:
        """The same for a batch that comes in instalments. If this trainer stops before the last,
        its successor gets the same ones again, and starts with the first."""
        self._seconds["wait"] = self._seconds["read"] = 0.0
        step = self._models.begin_step()
        for instalment in count(1):
            found = self._wait_for(seq, instalment)
            if found is None:
                step.discard()
                return None
            manifest, is_last = found
            step.add(self._assemble(manifest, partial(self._fetch_instalment, instalment)))
            if is_last:
                break
        return step.finish()

    def _wait_for(self, seq: int, instalment: int = 0) -> tuple[Manifest, bool] | None:
        """(a sealed manifest, whether it is the last of its batch); None: there is none, or this
        trainer is stopping."""
        started = time.perf_counter()
        while not self._is_stopping():
            request = BatchRequest(
                consumer=self._policy,
                seq=seq,
                incarnation=self._cursor.incarnation,
                wait_s=POLL_S,
                instalment=instalment,
            )
            answer = self._dataflow.batch(request)
            if answer.checkpoint_now:
                self._save()
            if answer.end:
                self._has_ended = True
                return None
            if answer.manifest is not None:
                self._seconds["wait"] += time.perf_counter() - started
                return answer.manifest, answer.is_last
            broadcast_order(self._ranks, RankOrder.WAIT)
        return None

    def _assemble(
        self, manifest: Manifest, fetch: Callable[[Manifest], Sequence[RowPayload]]
    ) -> Batch:
        started = time.perf_counter()
        rows = fetch(manifest)
        batch = self._models.assemble(manifest, rows, self._policy)
        self._seconds["read"] += time.perf_counter() - started
        return batch

    def _fetch(self, manifest: Manifest) -> Sequence[RowPayload]:
        minibatches, cost = self._models.minibatches, self._models.cost
        return fetch_rows(self._dataflow, manifest, self._ranks, minibatches=minibatches, cost=cost)

    def _fetch_instalment(self, instalment: int, manifest: Manifest) -> Sequence[RowPayload]:
        return self._dataflow.instalment_rows(self._policy, manifest.seq, instalment).rows

    def _commit(self, seq: int, stats: Stats) -> None:
        trained = stats.skipped is None
        cursor = replace(self._cursor, seq=seq, number=self._cursor.number + (1 if trained else 0))
        seconds = {f"seconds/{what}": value for what, value in self._seconds.items()}
        values = {**self._monitor.reported(stats), **seconds}
        values["seconds"] = values["seconds/read"] + values["seconds/train"]
        body = CommitRequest(
            incarnation=cursor.incarnation,
            number=cursor.number,
            skipped=stats.skipped or "",
            stats=values,
        )
        self._dataflow.commit(self._policy, seq, body)
        self._cursor = cursor
        self._other_models_updated |= stats.other_models_updated
        alarms = self._monitor.observe(seq, stats)
        self._metrics.append(
            {
                "policy": self._policy,
                "number": cursor.number,
                "seq": cursor.seq,
                "incarnation": cursor.incarnation,
                "skipped": body.skipped,
                **({"alarm": "\n".join(alarms)} if alarms else {}),
                **values,
            }
        )
        if not trained:
            _log.warning("batch skipped", policy=self._policy, seq=seq, why=body.skipped)

    def _quarantine(self, node: DriftingNode) -> None:
        body = QuarantineRequest(
            policy=self._policy,
            incarnation=self._cursor.incarnation,
            why=str(node),
        )
        self._dataflow.quarantine(node.node_id, body)

    def _publish(self) -> None:
        started = time.perf_counter()
        if self._publisher.is_keeping:
            self._flush(self._publisher)
        token = new_token()
        broadcast_order(self._ranks, RankOrder.WEIGHTS, token, self._publisher.drop_waiting())
        self._publisher.submit(self._models.weights(), self._cursor.number, token=token)
        if self._publishes_all:
            self._flush(self._publisher)
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
        newest = [found.manifest_digest for found in versions if found.by is VersionUser.NEWEST]
        return [found.manifest_digest for found in versions], newest

    def _save(self) -> None:
        """Hand over a copy of everything the next step depends on, one shard per rank; if nothing
        but the cursor has changed since the last time, only the cursor."""
        started = time.perf_counter()
        self._flush(self._saver)
        last = self._checkpoints.last.cursor
        if last == self._cursor:
            return
        if last.number == self._cursor.number and not self._other_models_updated:
            self._saver.advance_cursor(self._cursor, to_json(self._monitor.state))
        else:
            self._save_all()
        self._seconds["checkpoint"] = time.perf_counter() - started

    def _save_all(self) -> None:
        token = new_token()
        is_linked = self._models.dtypes == {self._snapshots.dtype}
        broadcast_order(self._ranks, RankOrder.STATE, token, int(not is_linked))
        number = self._cursor.number
        weights = self._publisher.keep(number) if is_linked else self._models.weights()
        state = self._models.state_tensors()
        self._saver.submit(
            self._cursor,
            weights=weights,
            state=state,
            static=self._snapshots.static,
            token=token,
            monitor_state=to_json(self._monitor.state),
        )
        self._other_models_updated = False

    def _flush(self, worker: Publisher | Saver) -> None:
        """Wait for what is being written; send keepalives meanwhile, so that a rank whose write
        failed can raise."""
        while not worker.flush(KEEPALIVE_S):
            broadcast_order(self._ranks, RankOrder.WAIT)

    def _check_not_replaced(self) -> None:
        """Check for a successor: a trainer may have been suspended for long before it saves.

        Saving removes older checkpoints, and no fenced call happens between a stop and the save."""
        incarnation = self._dataflow.state(self._policy).incarnation
        if incarnation != self._cursor.incarnation:
            raise Fenced(
                f"incarnation {self._cursor.incarnation} of {self._policy} was replaced by "
                f"{incarnation}; stopping without saving a checkpoint"
            )

    def _report_checkpoints(self) -> None:
        """Report usable checkpoints to the ledger, so that it keeps the rows after the oldest."""
        # Without any, a successor would restore the initial model.
        retained = self._checkpoints.retained or ((0, 0),)
        body = CheckpointsRequest(incarnation=self._cursor.incarnation, retained=retained)
        self._dataflow.checkpoints(self._policy, body)
