# SPDX-License-Identifier: Apache-2.0
"""The dataflow service without HTTP: coordinator and partition in one process, over one ledger.

Owns time and the order in which they act on each other. Nodes call `nodes`, trainers `trainers`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

import structlog

from penstock.dataflow.core.multiplexing import VisitSpec
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.core.partition_runtime import RowReaders
from penstock.dataflow.explain.starvation import is_starving, starvation, unserved
from penstock.dataflow.ledger.assemble import CoordinatorCore, finish_coordinator_restore
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.ledger.restore import read_evaluated, restore_ready_groups
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import (
    Deletion,
    EvaluatedRecord,
    EvaluationRecord,
    EvaluationState,
    Record,
)
from penstock.dataflow.report.figures import BalanceSettings
from penstock.dataflow.report.flow_counter import SCORED
from penstock.dataflow.report.ledger_counts import count_untrusted_tokens
from penstock.dataflow.service.nodes.handlers import NodeHandlers
from penstock.dataflow.service.operators.forget import SessionEraser
from penstock.dataflow.service.operators.observe import make_monitor, observe_service
from penstock.dataflow.service.partitions.handlers import PartitionHandlers
from penstock.dataflow.service.process import Process
from penstock.dataflow.service.resource_sharing import ResourceSharing
from penstock.dataflow.service.row_payloads import RowPayloads
from penstock.dataflow.service.rows.handlers import RowService
from penstock.dataflow.service.trainers.handlers import TrainerHandlers
from penstock.errors import StoreError
from penstock.types import GroupId, OutcomeKind, PolicyName, PublishedVersion

log = structlog.get_logger(__name__)

EvaluationWriter = Callable[
    [EvaluationRecord, Sequence[EvaluatedRecord], EvaluationRecord | None], None
]
"""Stores a done evaluation, given its answers and the best one so far."""
TICK_S = 0.5
SWEEP_S = 3600.0
STALL_S = 1.0
"""A tick later than this means that the process stalled, not that nodes were silent."""


class DataflowService:
    def __init__(
        self,
        make_process: Callable[..., Process],
        make_rows: Callable[[Process], RowService],
        make_core: Callable[[RowReaders], CoordinatorCore],
        *,
        run: str,
        stages: Mapping[PolicyName, tuple[str, ...]],
        report: BalanceSettings,
        visit: VisitSpec | None = None,
    ) -> None:
        """stages: the stages that each policy's trainer waits for. visit: how long resources that
        roll out and train do the one before the other."""
        self.is_restored = asyncio.Event()
        """Set when all groups that wait for a batch are loaded; until then only leases work."""
        process = make_process(
            on_command=self._on_command, on_wake=self._on_wake, on_write=self._on_write
        )
        rows = make_rows(process)
        core = make_core(rows.row_window)
        assert core.host is not None, "this process has a partition"
        coordinator, host, router = core.coordinator, core.host, core.router
        self.process = process
        self.coordinator = coordinator
        self.host = host
        self.partition: Partition = host.partition
        self.router = router
        self._core = core
        self.sharing = ResourceSharing(process, coordinator, host.partition, visit or VisitSpec())
        self.nodes = NodeHandlers(
            process,
            host,
            rows,
            lambda: self.is_restored.is_set() and self._may_nodes_leave(),
            sharing=self.sharing,
        )
        self.rows = rows
        self._stages = stages
        self.balance = make_monitor(process, core, run, report)
        self.partitions = PartitionHandlers(process, coordinator, router)
        self.trainers = TrainerHandlers(
            process,
            coordinator,
            core.sealing,
            core.manifests,
            RowPayloads(process.ledger, rows.blobs),
            self.balance,
            self.partitions.address_of,
            self.sharing,
        )
        self.session_eraser = SessionEraser(process, coordinator)
        self.source_error = ""
        """Error raised by a user's source at its last request for a task."""
        self._has_failed = False
        """Too many failures in a row were logged."""
        self.evaluation_writer: EvaluationWriter | None = None
        """Stores the results of evaluations; None: they stay in the ledger."""
        self._written: set[tuple[int, int]] = set()
        """Evaluations whose results it has stored, by incarnation and number."""
        if coordinator.evaluations is not None:
            self.nodes.pinned_versions = self._pinned_versions
        self._unserved: set[str] = set()
        """What sources without a node waited for at the last tick."""
        self._may_issue = True
        """Try to issue groups at the next command, whatever it changed: at the start and each
        tick."""
        self._update_missing_stages()

    def _may_nodes_leave(self) -> bool:
        return self.coordinator.may_nodes_leave(self.process.clock())

    def _pinned_versions(self) -> tuple[PublishedVersion, ...]:
        """Of the evaluation in progress, in whichever partition its questions are."""
        evaluations = self.coordinator.evaluations
        if evaluations is None or evaluations.current is None:
            return ()
        return self.host.gate.published(evaluations.current.pins)

    @property
    def is_finished(self) -> bool:
        """The run is finished, and the results of its evaluations are stored."""
        return self.coordinator.is_finished and not self._unwritten()

    def _unwritten(self) -> list[EvaluationRecord]:
        """Done evaluations whose results are not stored; of each number only the newest, since a
        result is named by its number."""
        evaluations = self.coordinator.evaluations
        if evaluations is None or self.evaluation_writer is None:
            return []
        done = {
            number: one
            for (_, number), one in sorted(evaluations.records.items())
            if one.state == EvaluationState.DONE
        }
        return [one for one in done.values() if (one.incarnation, one.number) not in self._written]

    async def _write_evaluations(self, done: Sequence[EvaluationRecord]) -> None:
        """Store what evaluations found, whose answers are in the ledger. A full disk must not end
        the service: tried again."""
        evaluations, writer = self.coordinator.evaluations, self.evaluation_writer
        for one in done:
            assert evaluations is not None and writer is not None
            answers = read_evaluated(self.process.ledger.tables, one)
            try:
                await asyncio.to_thread(writer, one, answers, evaluations.best)
            except OSError as error:
                log.warning("evaluation not stored", number=one.number, error=str(error))
                return
            log.info("evaluated", policy=one.policy, number=one.number, **one.scores)
            self._written.add((one.incarnation, one.number))

    def restore(self) -> list[GroupId]:
        """Load groups that wait for a batch, and the report's counts, from the ledger. Blocks;
        for any thread, before `complete`, which takes the result."""
        tables = self.process.ledger.tables
        freed = restore_ready_groups(self.coordinator, tables)
        self.balance.flow_counter.restore(tables)
        self.nodes.trajectories = int(
            tables.scalar("SELECT count(*) FROM rows WHERE space = 'train'") or 0
        )
        totals = [counters.flow for counters in self.balance.flow_counter.policies.values()]
        self.nodes.sampled_tokens = sum(flow.produced.tokens for flow in totals)
        self.nodes.untrusted_tokens = count_untrusted_tokens(tables)
        self.nodes.failed_tokens = sum(
            flow.wasted[kind].tokens
            for flow in totals
            for kind in OutcomeKind
            if kind not in SCORED and kind in flow.wasted
        )
        return freed

    def complete(self, freed: Sequence[GroupId]) -> None:
        """Finish the restore: act on events since the start, then answer all calls."""
        finish_coordinator_restore(self._core, freed, self.process.clock())
        self.is_restored.set()

    def _on_command(self, now: float) -> None:
        """Let the coordinator judge closed groups; new groups are issued after the answers are
        sent."""
        if not self.is_restored.is_set():
            return
        self.process.run_deferred()
        has_run = self.router.run(now)
        self.host.apply_completed_columns(now)
        has_run = self.router.run(now) or has_run
        if not has_run and not self._may_issue:
            return  # no group ended and no policy advanced, so the room is unchanged
        self._may_issue = False
        if self.coordinator.is_trained:
            self.coordinator.drop_open_groups()
            self.router.run(now)
        if not self.coordinator.is_finished:
            self.process.defer(partial(self._issue, now))

    def _on_wake(self) -> None:
        self.nodes.on_wake()
        self.partitions.on_wake()
        self.rows.on_wake()

    def _on_write(self, records: Sequence[Record | Deletion]) -> Sequence[Record]:
        """Count written records for the report, once it has counted the existing ones."""
        return self.balance.on_records(records) if self.is_restored.is_set() else ()

    def _issue(self, now: float) -> None:
        """Issue groups while there is room. An error in a user's source stops new work only."""
        try:
            self.coordinator.issue(now)
        except Exception as error:
            if str(error) != self.source_error:
                log.exception("source failed; no new work until it recovers")
            self.source_error = f"{type(error).__name__}: {error}"
        else:
            self.source_error = ""
        self.router.run(now)

    async def run_timers(self) -> None:
        if not self.is_restored.is_set():
            await self._finish_restore()
        async with asyncio.TaskGroup() as loops:
            start_loops(loops, self.process, self.partition, self.rows, self.tick)

    async def _finish_restore(self) -> None:
        try:
            freed = await asyncio.to_thread(self.restore)
        except StoreError as error:
            self.process.ledger.on_failure(error)  # a failed start must end the process
            raise
        self.complete(freed)
        gc.freeze()  # restored objects stay: keep them out of garbage collection

    async def tick(self) -> None:
        """Expire leases and deadlines, and try to issue work: a failed source may have
        recovered."""
        self.partition.tick(self.process.clock())
        self._update_missing_stages()
        self._log_starvation()
        self._log_unserved()
        self._log_failure()
        self._may_issue = True
        self.partitions.tick()
        self.balance.look(observe_service(self.coordinator, self.host), self.process.clock())
        done = self._unwritten()  # one that is done during the commit may have later answers
        await self.process.make_durable()
        await self._write_evaluations(done)
        self.nodes.tick()
        await self.rows.tick()

    def _update_missing_stages(self) -> None:
        """A policy whose required stage has no live worker gets no new work."""
        now = self.process.clock()
        far = self.partitions.stages_without_worker()
        for policy, stages in self._stages.items():
            missing = [s for s in stages if not self.rows.readers.has_worker(s, now) or s in far]
            self.coordinator.consumers[policy].missing_stages = ", ".join(missing)

    def _log_starvation(self) -> None:
        """Log policies whose groups are all dropped; again each time their number doubles."""
        for policy, consumer in self.coordinator.consumers.items():
            found = consumer.starvation
            if is_starving(consumer, self.coordinator) and found.num_groups >= 2 * found.num_logged:
                found.num_logged = found.num_groups
                why = starvation(consumer, self.process.ledger.tables)
                log.error("policy is starving: no groups admitted", policy=policy, why=why)

    def _log_unserved(self) -> None:
        """Log once that a source has tasks that no node can serve."""
        found = {*unserved(self.partition)}
        for text in sorted(found - self._unserved):
            log.warning("tasks wait for a node", what=text)
        self._unserved = found

    def _log_failure(self) -> None:
        """Log once that all groups fail and no new work starts."""
        cause = self.coordinator.failure_limit.cause(self.process.clock())
        if cause and not self._has_failed:
            log.error("no new work starts", why=cause)
        self._has_failed = bool(cause)

    def close(self) -> None:
        self.process.ledger.close()


Tick = Callable[[], Awaitable[None]]


def start_loops(
    loops: asyncio.TaskGroup, process: Process, partition: Partition, rows: RowService, tick: Tick
) -> None:
    """Start the loops of every process that has a partition."""
    loops.create_task(_run_ticks(process, partition, rows, tick), name="ticks")
    loops.create_task(Compactor(process.ledger).run(), name="compaction")
    loops.create_task(_sweep_blobs(rows), name="blobs")
    loops.create_task(_verify_once(process.ledger), name="verification")


async def _run_ticks(process: Process, partition: Partition, rows: RowService, tick: Tick) -> None:
    """consumes: time · produces: expired leases · waits for: the next tick"""
    await process.make_durable()
    while True:
        slept_at = process.clock()
        await asyncio.sleep(TICK_S)
        late_s = process.clock() - slept_at - TICK_S
        if late_s > STALL_S:
            log.warning("service stalled; lease deadlines extended", seconds=late_s)
            partition.extend_deadlines(late_s)
            rows.readers.extend_deadlines(late_s)
        await tick()


async def _verify_once(ledger: Ledger) -> None:
    """consumes: the ledger's database, once · produces: the end of this process if it is damaged
    waits for: the disk"""
    try:
        await asyncio.to_thread(ledger.tables.verify)
    except StoreError as error:
        ledger.on_failure(error)
        raise


async def _sweep_blobs(rows: RowService) -> None:
    """consumes: time · produces: space of abandoned uploads and unreferenced blobs · waits for: the
    hour"""
    while True:
        await asyncio.sleep(SWEEP_S)
        await rows.sweep_blobs()
