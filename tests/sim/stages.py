# SPDX-License-Identifier: Apache-2.0
"""Scoring stages of a simulated run: they write the columns that policies need, late, failed, or
in time, but always in the end.

What is to do is read from the durable records, as a real stage's leases come from the service.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.sim.events import Command, EventLoop
from tests.sim.plans import Plan
from tests.sim.processes import SimProcess

from penstock.dataflow.column_records import ColumnRecord
from penstock.dataflow.records import CompletionRecord, RowRecord
from penstock.types import RowId

LOOK_S = 1.5


class Stages:
    def __init__(self, engine: EventLoop, plan: Plan, machines: Sequence[SimProcess]) -> None:
        self._engine = engine
        self._plan = plan
        self._machines = machines
        self._due: dict[tuple[RowId, str], float] = {}
        self._done: set[tuple[RowId, str]] = set()

    def begin(self) -> None:
        if self._plan.judge or self._plan.train:
            self._engine.at(LOOK_S, "", self._look)

    def _look(self) -> None:
        for machine in self._machines:
            if machine.is_up:
                self._work(machine)
        self._engine.at(LOOK_S, "", self._look)

    def _work(self, machine: SimProcess) -> None:
        wanted: list[tuple[RowId, str]] = []
        in_training = {
            record.group_id
            for record in machine.disk.of(CompletionRecord).values()
            if record.state == "training"
        }
        for row in machine.disk.of(RowRecord).values():
            if row.summary.outcome not in ("completed", "truncated"):
                continue
            if self._plan.judge:
                wanted.append((row.row_id, "reward"))
            if self._plan.train and row.group_id in in_training:
                wanted.append((row.row_id, "reference"))
        written = machine.disk.of(ColumnRecord)
        for row_id, name in wanted:
            if ("train", row_id, name) in written:
                continue
            due = self._due.setdefault((row_id, name), self._engine.now + self._delay_s())
            if self._engine.now >= due:
                self._write(machine, row_id, name)

    def _delay_s(self) -> float:
        return self._engine.rng.choice((0.0, 0.0, 2.0, 8.0))

    def _write(self, machine: SimProcess, row_id: RowId, name: str) -> None:
        failed = "scorer" if self._engine.fault_chance(self._plan.faults.column_failed) else ""
        value = self._engine.rng.choice((0.0, 1.0)) if name == "reward" else -1.0
        command = Command(
            run=lambda target, now: target.write_column(row_id, name, failed, value, now)
        )
        machine.handle(f"stage {name} {row_id} {failed}", command, lambda answer: None)
