# SPDX-License-Identifier: Apache-2.0
"""Blows that fall on a simulated run: crashes, failing and slow disks, stalls, clock jumps, cut
lines, dying nodes and zombies, trainers that crash, pause and meet a successor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from tests.sim.events import Command, EventLoop, Network
from tests.sim.nodes import Node
from tests.sim.plans import Plan
from tests.sim.processes import CoordinatorProcess, PartitionProcess, SimProcess
from tests.sim.trainers import Trainer

MAX_JOINS = 2
MAX_LOST = 1


class FaultTarget(Protocol):
    """Who can be struck."""

    plan: Plan
    engine: EventLoop
    network: Network
    machines: list[SimProcess]
    nodes: list[Node]
    trainers: list[Trainer]
    coordinator: CoordinatorProcess
    is_fault_free: bool

    def join(self) -> None: ...


class FaultInjector:
    def __init__(self, world: FaultTarget) -> None:
        self._world = world
        self._engine = world.engine
        self._num_joined = 0
        self._num_lost = 0

    def begin(self) -> None:
        wait_s = self._engine.rng.expovariate(1 / self._world.plan.faults.trouble_s)
        self._engine.at(wait_s, "", self._inject)

    def _inject(self) -> None:
        if self._world.is_fault_free:
            return
        rng = self._engine.rng
        blows = (
            self._crash,
            self._crash,
            self._fail_disk,
            self._slow_disk,
            self._stall,
            self._jump,
            self._cut_off,
            self._kill_node,
            self._restart_node,
            self._zombie,
            self._crash_trainer,
            self._take_over,
            self._pause_trainer,
            self._join,
            self._drain,
            self._lose,
        )
        rng.choice(blows)()
        self.begin()

    def _later(self, low: float, high: float, event: Callable[[], None]) -> None:
        def happen() -> None:
            if not self._world.is_fault_free:
                event()

        self._engine.at(self._engine.between(low, high), "", happen)

    def _crash(self) -> None:
        machine = self._engine.rng.choice(self._world.machines)
        machine.die("killed")
        self._revive(machine)

    def _revive(self, machine: SimProcess) -> None:
        # Its wall clock may have been set meanwhile, in either direction.
        machine.skew_s = self._engine.rng.choice((0.0, 0.0, 3600.0, -3600.0))
        self._later(0.5, 15.0, machine.start)

    def _fail_disk(self) -> None:
        machine = self._engine.rng.choice(self._world.machines)
        if not machine.is_up:
            return
        machine.disk.fails_next = True

        def failed() -> None:
            machine.die("its disk failed")
            self._revive(machine)

        machine.disk.on_failure = failed

    def _slow_disk(self) -> None:
        disk = self._engine.rng.choice(self._world.machines).disk
        disk.slow_s = self._engine.between(0.1, 2.0)
        self._later(1.0, 6.0, lambda: setattr(disk, "slow_s", 0.0))

    def _stall(self) -> None:
        machine = self._engine.rng.choice(self._world.machines)
        machine.stalled_until = self._engine.now + self._engine.between(0.5, 20.0)
        self._engine.note(f"{machine.name} stands still until {machine.stalled_until:.1f}")

    def _jump(self) -> None:
        machine = self._engine.rng.choice(self._world.machines)
        seconds = self._engine.rng.choice((2.0, 30.0, 86_400.0))
        machine.skew_s += seconds
        self._engine.note(f"the clock of {machine.name} jumps {seconds:g} s")

    def _cut_off(self) -> None:
        machine = self._engine.rng.choice(self._world.machines)
        self._engine.note(f"nobody reaches {machine.name}")
        self._world.network.cut = {machine.name}
        self._later(2.0, 20.0, lambda: setattr(self._world.network, "cut", None))

    def _kill_node(self) -> None:
        living = [node for node in self._world.nodes if not node.is_dead]
        if len(living) > 2:
            node = self._engine.rng.choice(living)
            self._engine.note(f"{node.name} dies for ever")
            node.is_dead = True
            node.stop()

    def _restart_node(self) -> None:
        node = self._engine.rng.choice([node for node in self._world.nodes if not node.is_dead])
        self._engine.note(f"{node.name} begins a new life")
        node.start()

    def _zombie(self) -> None:
        node = self._engine.rng.choice([node for node in self._world.nodes if not node.is_dead])
        self._engine.note(f"{node.name} is stopped for two ttl")
        node.pause(2 * self._world.plan.lease.ttl_s)

    def _join(self) -> None:
        if self._num_joined < MAX_JOINS:
            self._num_joined += 1
            self._world.join()

    def _drain(self) -> None:
        far = self._engine.rng.choice(self._world.machines[1:])
        assert isinstance(far, PartitionProcess)
        command = Command(run=lambda coordinator, now: coordinator.drain(far.index))
        self._world.coordinator.handle(f"drain {far.name}", command, lambda answer: None)

    def _lose(self) -> None:
        """Wrongly, for all that home knows: its process lives on until home refuses it."""
        if self._num_lost < MAX_LOST:
            self._num_lost += 1
            far = self._engine.rng.choice(self._world.machines[1:])
            assert isinstance(far, PartitionProcess)
            command = Command(run=lambda coordinator, now: coordinator.lose(far.index, now))
            self._world.coordinator.handle(
                f"declare {far.name} lost:", command, lambda answer: None
            )

    def _crash_trainer(self) -> None:
        trainer = self._engine.rng.choice(self._world.trainers)
        self._engine.note(f"trainer {trainer.policy} crashes")
        trainer.crash()
        self._later(0.5, 10.0, lambda: self._start_trainer(trainer))

    def _start_trainer(self, trainer: Trainer) -> None:
        if trainer.is_idle and not trainer.has_ended:
            trainer.start()

    def _take_over(self) -> None:
        trainer = self._engine.rng.choice(self._world.trainers)
        if trainer.has_ended:
            return
        self._engine.note(f"a second trainer of {trainer.policy} starts")
        if trainer.task is not None:
            trainer.task.paused_until = self._engine.now + self._engine.between(0.0, 10.0)
        trainer.start()

    def _pause_trainer(self) -> None:
        trainer = self._engine.rng.choice(self._world.trainers)
        self._engine.note(f"trainer {trainer.policy} pauses")
        if trainer.task is not None:
            trainer.task.paused_until = self._engine.now + self._engine.between(1.0, 20.0)
