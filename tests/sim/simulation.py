# SPDX-License-Identifier: Apache-2.0
"""A whole run under virtual time: processes, nodes, trainers, stages, and blows that fall on them;
then a kind world in which the run must get on.

`run(seed)` is the whole of it; the same seed gives the same events.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from tests.sim import state_checks
from tests.sim.disk import Disk
from tests.sim.events import Actor, Call, Command, EventLoop, Network, Sleep, Task
from tests.sim.faults import FaultInjector
from tests.sim.invariants import Invariants
from tests.sim.nodes import Node
from tests.sim.plans import Plan, random_plan
from tests.sim.processes import CoordinatorProcess, PartitionProcess, SimProcess
from tests.sim.slot_invariants import require
from tests.sim.stages import Stages
from tests.sim.trainers import Trainer

from penstock.dataflow.core.coordinator import PartitionState
from penstock.dataflow.records import PartitionRecord, RowRecord
from penstock.errors import Fenced, WireError

MAX_EVENTS = 200_000
FAULT_FREE_S = 400.0
"""Virtual seconds within which a kind world must see progress; a few times the longest timer."""
END_S = 2000.0
"""And within which a run of bounded length must end."""
MORE_BATCHES = 3
LOOK_EVENTS = 16
"""Between two looks at what must hold of all processes together."""


class Simulation:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.engine = engine = EventLoop(plan.seed)
        self.laws = laws = Invariants(plan)
        self.network = Network(engine)
        home_disk = Disk(engine, "home", laws.watch)
        laws.disks["home"] = home_disk
        if plan.has_partition:
            laws.disks["p0"] = home_disk
        self.coordinator = CoordinatorProcess(
            engine, plan, home_disk, name="home", check=self._check
        )
        self.machines: list[SimProcess] = [self.coordinator]
        for index in plan.partitions:
            self.machines.append(self._partition(index))
        self.serving = [m for m in self.machines if m is not self.coordinator or plan.has_partition]
        self.nodes = [
            Node(engine, self.network, plan, laws, self.serving, f"n{i}")
            for i in range(plan.num_nodes)
        ]
        self.trainers = [
            Trainer(engine, self.network, plan, laws, self.coordinator, policy)
            for policy in plan.policies
        ]
        self.stages = Stages(engine, plan, self.serving)
        self.is_fault_free = False
        self._believed: dict[str, state_checks.Facts] = {}
        self._num_open = 0
        for machine in self.machines:
            machine.before_death = self._capture_state
            machine.after_birth = self._compare_with_before

    def _partition(self, index: int) -> PartitionProcess:
        name = f"p{index}"
        disk = self.laws.disks[name] = Disk(self.engine, name, self.laws.watch)
        return PartitionProcess(
            index, engine=self.engine, plan=self.plan, disk=disk, name=name, check=self._check
        )

    # --- laws -------------------------------------------------------------------------------------

    def _check(self, machine: SimProcess) -> None:
        if isinstance(machine, CoordinatorProcess):
            state_checks.check_room(machine, self._num_open)
            self._num_open = len(machine.coordinator.open)
            self._switch_off(machine)
        if machine.disk.is_quiet:
            state_checks.check(self.laws, machine)

    def _switch_off(self, coordinator: CoordinatorProcess) -> None:
        """Whoever drained a partition ends its process when it is gone, for good."""
        known = coordinator.disk.of(PartitionRecord)
        for machine in self.machines:
            if not isinstance(machine, PartitionProcess) or machine.is_off:
                continue
            record = known.get((machine.index,))
            if record is not None and record.state == PartitionState.GONE:
                machine.die("nobody needs it any more")
                machine.is_off = True

    def _capture_state(self, machine: SimProcess) -> None:
        self._believed.pop(machine.name, None)
        if machine.disk.is_quiet:
            self._believed[machine.name] = state_checks.facts(machine)
            if machine is self.coordinator:
                self.laws.free()

    def _compare_with_before(self, machine: SimProcess) -> None:
        before = self._believed.pop(machine.name, None)
        self.laws.lives = self.coordinator.boot
        if before is not None and not state_checks.has_open_transaction(machine):
            state_checks.compare(before, state_checks.facts(machine), machine.name)
        self._num_open = len(self.coordinator.coordinator.open) if self.coordinator.is_up else 0

    # --- a run ------------------------------------------------------------------------------------

    def begin(self) -> None:
        for machine in self.machines:
            machine.start()
            if isinstance(machine, PartitionProcess):
                Task(self.engine, self.network, self._exchange(machine))
        for trainer in self.trainers:
            trainer.start()
        for node in self.nodes:
            node.start()
        self.stages.begin()

    def run(self) -> None:
        faults = self.plan.faults
        self.network.loss, self.network.repeats = faults.loss, faults.repeats
        self.network.slow = faults.slow
        self.begin()
        FaultInjector(self).begin()
        self.advance(lambda: self.engine.now > self.plan.fault_s, MAX_EVENTS)
        self.stop_faults()
        self.require_progress()

    def join(self) -> None:
        """A further partition starts while the run goes on."""
        partition = self._partition(len(self.machines))
        partition.before_death, partition.after_birth = (
            self._capture_state,
            self._compare_with_before,
        )
        self.machines.append(partition)
        self.engine.note(f"{partition.name} joins")
        partition.start()
        Task(self.engine, self.network, self._join(partition))

    def _join(self, partition: PartitionProcess) -> Actor:
        answer = None
        while answer != "joined":
            answer = yield Call(
                target=self.coordinator,
                name=f"{partition.name} join",
                command=Command(run=lambda coordinator, now: coordinator.join(partition.index)),
            )
        self.serving.append(partition)
        for node in self.nodes:
            node.learn(partition)
        yield from self._exchange(partition)

    def advance(self, is_over: Callable[[], bool], max_events: int = MAX_EVENTS) -> bool:
        """Until something holds; the law that nothing vanishes is read every few events."""
        for count in range(max_events):
            if count % LOOK_EVENTS == 0:
                self.laws.check_conservation()
                if is_over():
                    return True
            if not self.engine.step():
                return False
        return False

    def stop_faults(self) -> None:
        """No fault from here on; who was dead for ever stays dead."""
        self.engine.note("the world is kind")
        self.is_fault_free = self.engine.is_kind = True
        self.network.loss = self.network.repeats = self.network.slow = 0.0
        self.network.cut = None
        for machine in self.machines:
            machine.disk.fails_next, machine.disk.slow_s = False, 0.0
            machine.start()
        for trainer in self.trainers:
            if trainer.is_idle and not trainer.has_ended:
                trainer.start()

    def require_progress(self) -> None:
        """Every policy goes on or ends, what was open ends, every link drains (G7)."""
        laws, coordinator = self.laws, self.coordinator
        seqs = {policy: branch.seq for policy, branch in laws.branches.items()}
        opened = [*laws.open_issued]
        sent = {link: len(bodies) for link, bodies in laws.bodies.items()}

        def missing() -> list[str]:
            found = [
                f"{policy} committed {branch.seq - seqs[policy]} more batches"
                for policy, branch in laws.branches.items()
                if branch.seq < seqs[policy] + MORE_BATCHES
                and not coordinator.coordinator.has_ended(coordinator.coordinator.consumers[policy])
            ]
            found += [f"{group} is open" for group in opened if group in laws.open_issued]
            found += [
                f"{link} has {sent[link] - laws.received[link]} messages to take"
                for link in sent
                if laws.received[link] < sent[link] and self._is_read(link)
            ]
            return found

        until = self.engine.now + FAULT_FREE_S
        self.advance(lambda: self.engine.now > until or not missing())
        require(not missing(), f"no progress in a kind world: {'; '.join(missing()[:6])}")
        if self.plan.ends:
            self._require_end()
        laws.check_conservation()
        self.advance(lambda: coordinator.disk.is_quiet)
        laws.free()
        self.require_all_kept()

    def _require_end(self) -> None:
        """Steps or tasks are bounded: the run ends, and then nothing is open or on its way."""
        laws, coordinator = self.laws, self.coordinator

        def missing() -> list[str]:
            found = [f"{group} is open" for group in laws.open_issued]
            found += [
                f"{link} has messages to take"
                for link, bodies in laws.bodies.items()
                if laws.received[link] < len(bodies) and self._is_read(link)
            ]
            found += [f"{p} keeps {[*kept]}" for p, kept in laws.admitted.items() if kept]
            return found if coordinator.coordinator.is_finished else ["the run goes on", *found]

        until = self.engine.now + END_S
        self.advance(lambda: self.engine.now > until or not missing())
        require(not missing(), f"the run does not end: {'; '.join(missing()[:6])}")

    def _is_read(self, link: str) -> bool:
        """Neither lost nor switched off."""
        name = link.replace("coordinator", "").strip(">")
        is_off = any(machine.is_off for machine in self.machines if machine.name == name)
        return not is_off and name not in self.laws.lost

    def require_all_kept(self) -> None:
        """What was acknowledged is in the tables that the next life will read."""
        for row_id, digest in self.laws.acked.items():
            found = self.laws.disk_of(_group_of(row_id)).of(RowRecord).get((row_id,))
            require(found is not None and found.summary.digest == digest, f"row {row_id} is lost")
        for machine in self.machines:
            rows = machine.disk.tables.rows("SELECT row_id, digest FROM rows")
            kept = {(r.row_id, r.summary.digest) for r in machine.disk.of(RowRecord).values()}
            require(kept == {tuple(row) for row in rows}, f"tables of {machine.name} differ")

    def close(self) -> None:
        for machine in self.machines:
            machine.disk.close()

    # --- links ------------------------------------------------------------------------------------

    def _exchange(self, partition: PartitionProcess) -> Actor:
        """What a partition's process does all its lives: push and pull, again and again."""
        while True:
            yield Sleep(seconds=self.engine.between(0.2, 0.6))
            if not partition.is_up:
                continue
            boot = partition.boot
            asked: list[Any] = []
            partition.handle(
                "",
                Command(run=lambda p, now: (p.link.num_received, p.link.unacknowledged(0))),
                asked.append,
            )
            while not asked and partition.is_up and partition.boot == boot:
                yield Sleep(seconds=0.05)
            if not asked:
                continue
            received, messages = asked[0]
            answer = yield Call(
                target=self.coordinator,
                name=f"{partition.name} exchange",
                command=self._offer(partition.index, received, messages),
                tries=2,
            )
            if isinstance(answer, Fenced):
                partition.die("it was declared lost")
                partition.is_off = True
                return
            if answer is None or isinstance(answer, WireError):
                continue
            partition.handle(f"{partition.name} takes", self._take(partition, answer), _ignore)

    def _reordered(self, messages: Any) -> Any:
        """Of one call's messages some may be lost, and others overtake."""
        kept = [message for message in messages if not self.engine.chance(self.network.loss)]
        if self.engine.chance(self.network.slow):
            self.engine.rng.shuffle(kept)
        return tuple(kept)

    def _offer(self, index: int, received: int, messages: Any) -> Command:
        messages = self._reordered(messages)

        def run(coordinator: CoordinatorProcess, now: float) -> Any:
            for message in messages:
                self.laws.takes(f"p{index}>coordinator", message.number, message.body)
            return coordinator.exchange(index, received, messages, now)

        return Command(run=run)

    def _take(self, partition: PartitionProcess, answer: Any) -> Command:
        received, messages = answer[0], self._reordered(answer[1])

        def run(machine: PartitionProcess, now: float) -> Any:
            for message in messages:
                self.laws.takes(f"coordinator>p{machine.index}", message.number, message.body)
            return machine.take(received, messages, now)

        return Command(run=run)


def _ignore(answer: Any) -> None:
    return None


def _group_of(row_id: str) -> Any:
    return row_id.partition(".")[0]


def run(seed: int, plan: Plan | None = None) -> Simulation:
    """The whole history of a seed. Its last events are printed when a law is broken, and all of
    them when PENSTOCK_SIM_SEED names it."""
    simulation = Simulation(plan or random_plan(seed))
    log = simulation.engine.log
    is_wanted = os.environ.get("PENSTOCK_SIM_SEED") == str(seed)
    try:
        simulation.run()
    except BaseException:
        print("\n".join([f"seed {seed}: {simulation.plan}", *(() if is_wanted else log[-60:])]))
        raise
    finally:
        if is_wanted:
            print("\n".join(log))
        simulation.close()
    return simulation
