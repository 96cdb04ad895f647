# SPDX-License-Identifier: Apache-2.0
"""Processes of a simulated run: home and partitions around the real core, each with its disk, its
clock and its lives.

Each command does what the service's own does: decide, drive, make durable, answer. A process that
dies forgets all that was not durable and is built again from its tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tests.sim.disk import Disk
from tests.sim.events import Command, EventLoop, Reply
from tests.sim.plans import Plan

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.core.completion import ColumnCompleted
from penstock.dataflow.core.coordinator import Coordinator, PartitionState
from penstock.dataflow.core.links import Link
from penstock.dataflow.core.message_router import MessageRouter
from penstock.dataflow.core.messages import IncarnationStarted, Published
from penstock.dataflow.core.partition_runtime import PartitionRuntime
from penstock.dataflow.ledger.assemble import (
    CoordinatorCore,
    build_coordinator_core,
    build_partition_core,
)
from penstock.dataflow.records import (
    BatchRecord,
    CheckpointRecord,
    CommandJournal,
    FreedRecord,
    GroupRecord,
    InstalmentRecord,
    PartitionRecord,
)
from penstock.dataflow.service.partitions.handlers import add_remote_partition
from penstock.errors import Conflict, Fenced, WireError
from penstock.types import PolicyName, RowId

TICK_S = 1.0
STALL_S = 1.0
EPOCH_S = 1_000_000.0
IDLE_CHECKS = 8
"""Commands that changed nothing durable, such as heartbeats, have the laws read so often only."""


class SimProcess:
    """One process: down, or in one of its lives."""

    def __init__(
        self,
        engine: EventLoop,
        plan: Plan,
        disk: Disk,
        *,
        name: str,
        check: Callable[[SimProcess], None],
    ) -> None:
        self.engine = engine
        self.plan = plan
        self.disk = disk
        self.name = name
        self.is_up = False
        self.is_off = False
        """Switched off by a person, for ever."""
        self.boot = 0
        self.skew_s = 0.0
        self.stalled_until = 0.0
        self.journal = CommandJournal()
        self.host: PartitionRuntime | None = None
        self.router = MessageRouter()
        self.before_death: Callable[[SimProcess], None] = lambda machine: None
        self.after_birth: Callable[[SimProcess], None] = lambda machine: None
        self._check = check
        self._columns: set[tuple[RowId, str]] = set()
        """Written in this life."""
        self._ticked_at = 0.0
        self._num_commands = 0
        disk.on_failure = lambda: self.die("its disk failed")

    @property
    def clock(self) -> float:
        return EPOCH_S + self.engine.now + self.skew_s

    # --- lives ------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.is_up or self.is_off:
            return
        self.engine.note(f"{self.name} starts")
        self.is_up, self.stalled_until = True, 0.0
        self.boot += 1
        self.journal = CommandJournal()
        self._columns.clear()
        self.build()
        self.after_birth(self)
        self._ticked_at = self.clock
        self.handle("", Command(run=lambda machine, now: None), lambda answer: None)
        self._schedule_tick()

    def die(self, why: str) -> None:
        if not self.is_up:
            return
        self.engine.note(f"{self.name} dies: {why}")
        self.before_death(self)
        self.is_up = False
        self.disk.crash()

    def build(self) -> None:
        raise NotImplementedError

    def drive(self, now: float) -> None:
        self.router.run(now)

    # --- commands ---------------------------------------------------------------------------------

    def handle(self, name: str, command: Command, reply: Reply) -> None:
        if not self.is_up:
            return
        if self.stalled_until > self.engine.now:
            boot, wait_s = self.boot, self.stalled_until - self.engine.now + 0.001
            self.engine.at(wait_s, "", lambda: self._handle_later(boot, name, command, reply))
            return
        now = self.clock
        try:
            answer: Any = command.run(self, now)
        except WireError as error:
            answer = error
        self.drive(now)
        records = self.journal.take()
        if name:
            text = answer if isinstance(answer, (str, WireError)) else ""
            self.engine.note(f"{self.name} {name} {len(records)} {text}")
        if records or command.waits:
            self.disk.write(records, lambda: reply(answer() if callable(answer) else answer))
        else:
            reply(answer() if callable(answer) else answer)
        self._num_commands += 1
        if records or self._num_commands % IDLE_CHECKS == 0:
            self._check(self)

    def _handle_later(self, boot: int, name: str, command: Command, reply: Reply) -> None:
        if boot == self.boot:
            self.handle(name, command, reply)

    # --- time -------------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        boot = self.boot
        self.engine.at(TICK_S, "", lambda: self._tick(boot))

    def _tick(self, boot: int) -> None:
        if boot != self.boot or not self.is_up:
            return
        if self.stalled_until > self.engine.now:
            self.engine.at(self.stalled_until - self.engine.now, "", lambda: self._tick(boot))
            return
        late_s = self.clock - self._ticked_at - TICK_S
        self._ticked_at = self.clock
        run = Command(run=lambda machine, now: self._pass_time(late_s, now), waits=False)
        self.handle("", run, lambda answer: None)
        self._schedule_tick()

    def _pass_time(self, late_s: float, now: float) -> None:
        if self.host is None:
            return
        if late_s > STALL_S:
            self.host.partition.extend_deadlines(late_s)
        self.host.partition.tick(now)

    # --- columns ----------------------------------------------------------------------------------

    def write_column(self, row_id: RowId, name: str, failed: str, value: float, now: float) -> None:
        """What a stage does: the first write of a column stands."""
        assert self.host is not None
        if ("train", row_id, name) in self.disk.of(ColumnRecord) or (row_id, name) in self._columns:
            return
        self._columns.add((row_id, name))
        is_number = value >= 0
        record = ColumnRecord(
            space="train",
            row_id=row_id,
            name=name,
            failed=failed,
            value=value if is_number and not failed else None,
            digest="" if failed else f"c{row_id}/{name}",
            segment=0,
            offset=0,
            length=0,
            writer="stage",
            at=now,
        )
        self.journal(record)
        completed = ColumnCompleted(
            row_id=row_id, name=name, failed=failed, value=record.value, digest=record.digest
        )
        self.host.completion.completed([completed], self.host.partition.groups, now)


class CoordinatorProcess(SimProcess):
    core: CoordinatorCore

    def build(self) -> None:
        plan = self.plan
        self.core = build_coordinator_core(
            plan.terms,
            plan.sources,
            self.disk.tables,
            self.journal,
            self.clock,
            has_partition=plan.has_partition,
        )
        self.router, self.host = self.core.router, self.core.host
        for index in plan.partitions:
            if index not in self.core.coordinator.partition_states:
                self._add_partition(index)

    def _add_partition(self, index: int) -> None:
        self._mark(index, PartitionState.SERVING)
        add_remote_partition(index, self.coordinator, self.router, self.journal)

    def _mark(self, index: int, state: PartitionState) -> None:
        self.journal(
            PartitionRecord(
                index=index, url=f"sim://{index}", epoch=1, state=state.value, at=self.clock
            )
        )
        self.coordinator.partition_states[index] = state

    @property
    def coordinator(self) -> Coordinator:
        return self.core.coordinator

    def drive(self, now: float) -> None:
        self.router.run(now)
        if self.coordinator.is_finished:
            self.coordinator.drop_open_groups()
        else:
            self.coordinator.issue(now)
        self.router.run(now)

    # --- what trainers ask ------------------------------------------------------------------------

    def state(self, policy: PolicyName) -> tuple[int, int, int]:
        lineage = self.coordinator.consumer(policy).lineage
        return lineage.incarnation, lineage.number, lineage.seq

    def incarnate(
        self, policy: PolicyName, request_id: str, expected: int, number: int, seq: int, now: float
    ) -> int:
        consumer = self.coordinator.consumer(policy)
        record = consumer.lineage.incarnate(
            expected=expected, number=number, seq=seq, request_id=request_id, now=now
        )
        if record.incarnation != consumer.lineage.incarnation:
            if seq < self.coordinator.retention.oldest_servable(policy):
                raise Conflict(f"batches of {policy} after {seq} were let go")
            self.journal(record)
            consumer.lineage.apply_incarnation(record)
            self.coordinator.broadcast(IncarnationStarted(record=record))
            durable = {
                batch.seq: batch.num_groups - batch.num_replayed
                for batch in self.disk.of(BatchRecord).values()
                if batch.consumer == policy and batch.seq > seq
            }
            self.coordinator.cursor_moved(consumer, durable | consumer.sealed, now)
        return record.incarnation

    def batch(self, policy: PolicyName, incarnation: int, seq: int, now: float) -> Any:
        """The sealed batch, "end", "wait", or what finds it on disk once it is there."""
        consumer = self.coordinator.consumer(policy)
        consumer.lineage.require(incarnation)
        if seq <= consumer.last_sealed:
            return lambda: self.disk.of(BatchRecord)[policy, seq]
        if self.coordinator.has_ended(consumer):
            return "end"
        record = self.core.sealing.seal(consumer, seq, now)
        return "wait" if record is None else (lambda: record)

    def instalment(
        self, policy: PolicyName, incarnation: int, seq: int, number: int, now: float
    ) -> Any:
        """The same for a part of a batch."""
        consumer = self.coordinator.consumer(policy)
        consumer.lineage.require(incarnation)
        if seq <= consumer.last_sealed or number <= len(consumer.instalments):
            return lambda: self.disk.of(InstalmentRecord)[policy, seq, number]
        if self.coordinator.has_ended(consumer):
            return "end"
        record = self.core.sealing.seal_instalment(consumer, seq, now)
        return "wait" if record is None else (lambda: record)

    def commit(
        self, policy: PolicyName, seq: int, incarnation: int, number: int, skipped: str, now: float
    ) -> str:
        consumer = self.coordinator.consumer(policy)
        if seq > consumer.last_sealed:
            raise Conflict(f"batch {policy}.{seq} was never sealed")
        record = consumer.lineage.commit(
            seq=seq, incarnation=incarnation, number=number, skipped=skipped, stats="{}", now=now
        )
        if seq > consumer.lineage.seq:
            self.journal(record)
            consumer.lineage.apply_commit(record)
            self.coordinator.committed(record)
            self.coordinator.cursor_moved(consumer, consumer.sealed, now)
        return "committed"

    def publish(
        self, policy: PolicyName, incarnation: int, number: int, weights: str, now: float
    ) -> str:
        lineage = self.coordinator.consumer(policy).lineage
        record = lineage.publish(
            incarnation=incarnation,
            number=number,
            manifest_digest=f"{policy}@{incarnation}.{number}",
            weights_digest=weights,
            now=now,
        )
        if not lineage.has(record.incarnation, record.number):
            self.journal(record)
            lineage.apply_version(record)
            self.coordinator.broadcast(Published(record=record))
        return "published"

    def checkpoints(
        self, policy: PolicyName, incarnation: int, retained: list[tuple[int, int]], now: float
    ) -> str:
        self.coordinator.consumer(policy).lineage.require(incarnation)
        self.journal(
            CheckpointRecord(
                policy=policy,
                incarnation=incarnation,
                retained=msgspec.json.encode(retained).decode(),
                at=now,
            )
        )
        oldest = min((seq for _, seq in retained), default=None)
        self.coordinator.free(self.coordinator.retention.retained(policy, oldest), now)
        return "named"

    # --- what partitions, and people about them, ask ----------------------------------------------

    def join(self, index: int) -> str:
        if index not in self.coordinator.partition_states:
            self._add_partition(index)
        return "joined"

    def drain(self, index: int) -> str:
        """If others are left that take new groups."""
        serving = [
            i
            for i, shard in self.coordinator.partition_states.items()
            if shard is PartitionState.SERVING
        ]
        if len(serving) < 2 or index not in serving:
            return "stays"
        self._mark(index, PartitionState.DRAINING)
        return "drains"

    def lose(self, index: int, now: float) -> str:
        serving = [
            i
            for i, shard in self.coordinator.partition_states.items()
            if shard is PartitionState.SERVING
        ]
        is_last = not set(serving) - {index}
        if is_last or self.coordinator.partition_states.get(index) not in (
            PartitionState.SERVING,
            PartitionState.DRAINING,
        ):
            return "stays"
        self._mark(index, PartitionState.LOST)
        self.coordinator.declare_lost(index, now)
        return "is lost"

    def _pass_time(self, late_s: float, now: float) -> None:
        super()._pass_time(late_s, now)
        for index, shard in self.coordinator.partition_states.items():
            if shard is PartitionState.DRAINING and self.coordinator.is_empty(index):
                issued = (r for r in self.disk.of(GroupRecord).values() if r.partition == index)
                freed = self.disk.of(FreedRecord)
                if all((record.group_id,) in freed for record in issued):
                    self.engine.note(f"p{index} is gone")
                    self._mark(index, PartitionState.GONE)

    def exchange(self, index: int, received: int, messages: Any, now: float) -> Any:
        """Take what is new, and give what it lacks; nothing leaves before it is durable."""
        if self.coordinator.partition_states[index] is PartitionState.LOST:
            raise Fenced(f"partition {index} was declared lost")
        link = self.router.links[index]
        link.acknowledged(received)
        for message in link.receive(messages):
            self.coordinator.apply(message, now)
        self.drive(now)
        return link.num_received, link.unacknowledged(received)


class PartitionProcess(SimProcess):
    def __init__(self, index: int, **parts: Any) -> None:
        super().__init__(**parts)
        self.index = index

    def build(self) -> None:
        core = build_partition_core(
            self.index, self.plan.terms, self.disk.tables, self.journal, self.clock
        )
        self.router, self.host = core.router, core.host
        self.link: Link[Any, Any] = core.link

    def take(self, received: int, messages: Any, now: float) -> str:
        """Home's answer to an exchange."""
        assert self.host is not None
        self.link.acknowledged(received)
        for message in self.link.receive(messages):
            self.host.apply(message, now)
        return f"took up to {self.link.num_received}"
