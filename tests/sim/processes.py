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
from tests.sim.events import Command, Engine, Reply
from tests.sim.plans import Plan

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.core.completion import Landed
from penstock.dataflow.core.home import Home, Shard
from penstock.dataflow.core.links import Link
from penstock.dataflow.core.messages import Committed, Incarnated, Published
from penstock.dataflow.core.partition_host import PartitionHost
from penstock.dataflow.core.switchboard import Switchboard
from penstock.dataflow.ledger.assemble import Core, home_core, partition_core
from penstock.dataflow.records import (
    BatchRecord,
    CheckpointRecord,
    FreedRecord,
    IssuedRecord,
    Outbox,
    PartitionRecord,
)
from penstock.dataflow.service.partitions.handlers import welcome
from penstock.errors import Conflict, Fenced, WireError
from penstock.types import PolicyName, RowId

TICK_S = 1.0
STALL_S = 1.0
EPOCH_S = 1_000_000.0
IDLE_CHECKS = 8
"""Commands that changed nothing durable, such as heartbeats, have the laws read so often only."""


class Machine:
    """One process: down, or in one of its lives."""

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        disk: Disk,
        *,
        name: str,
        check: Callable[[Machine], None],
    ) -> None:
        self.engine = engine
        self.plan = plan
        self.disk = disk
        self.name = name
        self.is_up = False
        self.is_off = False
        """Switched off by a person, for ever."""
        self.life = 0
        self.skew_s = 0.0
        self.stalled_until = 0.0
        self.outbox = Outbox()
        self.host: PartitionHost | None = None
        self.board = Switchboard()
        self.before_death: Callable[[Machine], None] = lambda machine: None
        self.after_birth: Callable[[Machine], None] = lambda machine: None
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
        self.life += 1
        self.outbox = Outbox()
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
        self.board.run(now)

    # --- commands ---------------------------------------------------------------------------------

    def handle(self, name: str, command: Command, reply: Reply) -> None:
        if not self.is_up:
            return
        if self.stalled_until > self.engine.now:
            life, wait_s = self.life, self.stalled_until - self.engine.now + 0.001
            self.engine.at(wait_s, "", lambda: self._handle_later(life, name, command, reply))
            return
        now = self.clock
        try:
            answer: Any = command.run(self, now)
        except WireError as error:
            answer = error
        self.drive(now)
        records = self.outbox.take()
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

    def _handle_later(self, life: int, name: str, command: Command, reply: Reply) -> None:
        if life == self.life:
            self.handle(name, command, reply)

    # --- time -------------------------------------------------------------------------------------

    def _schedule_tick(self) -> None:
        life = self.life
        self.engine.at(TICK_S, "", lambda: self._tick(life))

    def _tick(self, life: int) -> None:
        if life != self.life or not self.is_up:
            return
        if self.stalled_until > self.engine.now:
            self.engine.at(self.stalled_until - self.engine.now, "", lambda: self._tick(life))
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
            self.host.partition.forgive(late_s)
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
        self.outbox(record)
        landed = Landed(
            row_id=row_id, name=name, failed=failed, value=record.value, digest=record.digest
        )
        self.host.completion.landed([landed], now)


class HomeMachine(Machine):
    core: Core

    def build(self) -> None:
        plan = self.plan
        self.core = home_core(
            plan.terms,
            plan.sources,
            self.disk.tables,
            self.outbox,
            self.clock,
            has_partition=plan.has_partition,
        )
        self.board, self.host = self.core.board, self.core.host
        for index in plan.partitions:
            if index not in self.core.home.shards:
                self._add_partition(index)

    def _add_partition(self, index: int) -> None:
        self._mark(index, Shard.SERVING)
        welcome(index, self.home, self.board, self.outbox)

    def _mark(self, index: int, state: Shard) -> None:
        self.outbox(
            PartitionRecord(
                index=index, url=f"sim://{index}", epoch=1, state=state.value, at=self.clock
            )
        )
        self.home.shards[index] = state

    @property
    def home(self) -> Home:
        return self.core.home

    def drive(self, now: float) -> None:
        self.board.run(now)
        if self.home.is_finished:
            self.home.wind_up()
        else:
            self.home.issue(now)
        self.board.run(now)

    # --- what trainers ask ------------------------------------------------------------------------

    def state(self, policy: PolicyName) -> tuple[int, int, int]:
        lineage = self.home.consumer(policy).lineage
        return lineage.incarnation, lineage.number, lineage.seq

    def incarnate(
        self, policy: PolicyName, request_id: str, expected: int, number: int, seq: int, now: float
    ) -> int:
        consumer = self.home.consumer(policy)
        record = consumer.lineage.incarnate(
            expected=expected, number=number, seq=seq, request_id=request_id, now=now
        )
        if record.incarnation != consumer.lineage.incarnation:
            if seq < self.home.retention.oldest_servable(policy):
                raise Conflict(f"batches of {policy} after {seq} were let go")
            self.outbox(record)
            consumer.lineage.apply_incarnation(record)
            self.home.tell_all(Incarnated(record=record))
            durable = {
                batch.seq: batch.num_groups - batch.num_replayed
                for batch in self.disk.of(BatchRecord).values()
                if batch.consumer == policy and batch.seq > seq
            }
            self.home.moved(consumer, durable | consumer.sealed, now)
        return record.incarnation

    def batch(self, policy: PolicyName, incarnation: int, seq: int, now: float) -> Any:
        """The sealed batch, "end", "wait", or what finds it on disk once it is there."""
        consumer = self.home.consumer(policy)
        consumer.lineage.require(incarnation)
        if seq <= consumer.last_sealed:
            return lambda: self.disk.of(BatchRecord)[policy, seq]
        if self.home.has_ended(consumer):
            return "end"
        record = self.core.sealing.seal(consumer, seq, now)
        return "wait" if record is None else (lambda: record)

    def commit(
        self, policy: PolicyName, seq: int, incarnation: int, number: int, skipped: str, now: float
    ) -> str:
        consumer = self.home.consumer(policy)
        if seq > consumer.last_sealed:
            raise Conflict(f"batch {policy}.{seq} was never sealed")
        record = consumer.lineage.commit(
            seq=seq, incarnation=incarnation, number=number, skipped=skipped, stats="{}", now=now
        )
        if seq > consumer.lineage.seq:
            self.outbox(record)
            consumer.lineage.apply_commit(record)
            self.home.tell_all(Committed(record=record))
            self.home.moved(consumer, consumer.sealed, now)
        return "committed"

    def publish(
        self, policy: PolicyName, incarnation: int, number: int, weights: str, now: float
    ) -> str:
        lineage = self.home.consumer(policy).lineage
        record = lineage.publish(
            incarnation=incarnation,
            number=number,
            manifest_digest=f"{policy}@{incarnation}.{number}",
            weights_digest=weights,
            now=now,
        )
        if not lineage.has(record.incarnation, record.number):
            self.outbox(record)
            lineage.apply_version(record)
            self.home.tell_all(Published(record=record))
        return "published"

    def checkpoints(
        self, policy: PolicyName, incarnation: int, retained: list[tuple[int, int]], now: float
    ) -> str:
        self.home.consumer(policy).lineage.require(incarnation)
        self.outbox(
            CheckpointRecord(
                policy=policy,
                incarnation=incarnation,
                retained=msgspec.json.encode(retained).decode(),
                at=now,
            )
        )
        oldest = min((seq for _, seq in retained), default=None)
        self.home.free(self.home.retention.retained(policy, oldest), now)
        return "named"

    # --- what partitions, and people about them, ask ----------------------------------------------

    def join(self, index: int) -> str:
        if index not in self.home.shards:
            self._add_partition(index)
        return "joined"

    def drain(self, index: int) -> str:
        """If others are left that take new groups."""
        serving = [i for i, shard in self.home.shards.items() if shard is Shard.SERVING]
        if len(serving) < 2 or index not in serving:
            return "stays"
        self._mark(index, Shard.DRAINING)
        return "drains"

    def lose(self, index: int, now: float) -> str:
        serving = [i for i, shard in self.home.shards.items() if shard is Shard.SERVING]
        is_last = not set(serving) - {index}
        if is_last or self.home.shards.get(index) not in (Shard.SERVING, Shard.DRAINING):
            return "stays"
        self._mark(index, Shard.LOST)
        self.home.lose_partition(index, now)
        return "is lost"

    def _pass_time(self, late_s: float, now: float) -> None:
        super()._pass_time(late_s, now)
        for index, shard in self.home.shards.items():
            if shard is Shard.DRAINING and self.home.is_empty(index):
                issued = (r for r in self.disk.of(IssuedRecord).values() if r.partition == index)
                freed = self.disk.of(FreedRecord)
                if all((record.group_id,) in freed for record in issued):
                    self.engine.note(f"p{index} is gone")
                    self._mark(index, Shard.GONE)

    def exchange(self, index: int, received: int, messages: Any, now: float) -> Any:
        """Take what is new, and give what it lacks; nothing leaves before it is durable."""
        if self.home.shards[index] is Shard.LOST:
            raise Fenced(f"partition {index} was declared lost")
        link = self.board.links[index]
        link.acknowledged(received)
        for message in link.receive(messages):
            self.home.apply(message, now)
        self.drive(now)
        return link.num_received, link.unacknowledged(received)


class PartitionMachine(Machine):
    def __init__(self, index: int, **parts: Any) -> None:
        super().__init__(**parts)
        self.index = index

    def build(self) -> None:
        self.board, self.host = partition_core(
            self.index, self.plan.terms, self.disk.tables, self.outbox, self.clock
        )

    @property
    def link(self) -> Link[Any, Any]:
        assert self.board.uplink is not None
        return self.board.uplink

    def take(self, received: int, messages: Any, now: float) -> str:
        """Home's answer to an exchange."""
        assert self.host is not None
        self.link.acknowledged(received)
        for message in self.link.receive(messages):
            self.host.apply(message, now)
        return f"took up to {self.link.num_received}"
