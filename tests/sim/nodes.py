# SPDX-License-Identifier: Apache-2.0
"""Rollout nodes of a simulated run: they beat, lease, work, deliver and hand back, fail, fall
silent and come back too late.

A node keeps every promise a real one makes: it repeats a call under its id until somebody answers,
and it never tells the service a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from tests.sim.events import Actor, Call, Command, EventLoop, Network, Sleep, Task
from tests.sim.invariants import Invariants
from tests.sim.plans import Plan
from tests.sim.processes import PartitionProcess, SimProcess

from penstock.dataflow.core.leasing import (
    DeliveryStatus,
    Grant,
    LiveVersion,
    NodeState,
    RegisterRequest,
)
from penstock.dataflow.records import RowRecord, row_id
from penstock.errors import Busy, Fenced, NotFound, WireError
from penstock.types import (
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    PublishedVersion,
    RowId,
    RowSummary,
)

HEARTBEAT_S = 3.5
WORD = {
    OutcomeKind.COMPLETED: "",
    OutcomeKind.TRUNCATED: "length",
    OutcomeKind.FAILED: "engine",
    OutcomeKind.CANCELLED: "drained",
}


@dataclass(slots=True)
class NodeAtPartition:
    """How this life of the node stands with one partition."""

    machine: SimProcess
    is_known: bool = False
    asking: str = ""
    """A lease request without an answer yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a node delivers; the same whenever it is repeated."""

    row: RowRecord
    outcome: Outcome


@dataclass(slots=True)
class Work:
    grant: Grant
    machine: SimProcess
    started_with: tuple[LiveVersion, ...]
    is_stopped: bool = False


class Node:
    def __init__(
        self,
        engine: EventLoop,
        network: Network,
        plan: Plan,
        laws: Invariants,
        machines: Sequence[SimProcess],
        name: str,
    ) -> None:
        self.name = NodeId(name)
        self.is_dead = False
        self.held: dict[RowId, Work] = {}
        self._engine = engine
        self._network = network
        self._plan = plan
        self._laws = laws
        self._machines = machines
        self._live: dict[PolicyName, LiveVersion] = {}
        self._lives = 0
        self._asked = 0
        self._tasks: list[Task] = []
        self._desks: list[NodeAtPartition] = []

    @property
    def boot_id(self) -> str:
        return f"{self.name}/{self._lives}"

    def start(self) -> None:
        """A new process: it holds nothing and serves nothing yet."""
        self.stop()
        self._lives += 1
        self.held, self._live = {}, {}
        self._desks = [NodeAtPartition(machine) for machine in self._machines if machine.plan]
        self._tasks = [self._spawn(self._serve(desk)) for desk in self._desks]

    def learn(self, machine: SimProcess) -> None:
        """Home named a further partition."""
        if not self.is_dead:
            self._desks.append(NodeAtPartition(machine))
            self._spawn(self._serve(self._desks[-1]))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._tasks = []

    def pause(self, seconds: float) -> None:
        """Stopped in mid-air; when it goes on it believes that nothing happened."""
        for task in self._tasks:
            task.paused_until = max(task.paused_until, self._engine.now + seconds)

    def _spawn(self, actor: Actor) -> Task:
        task = Task(self._engine, self._network, actor)
        self._tasks = [t for t in self._tasks if not t.is_over]
        self._tasks.append(task)
        return task

    # --- one partition ----------------------------------------------------------------------------

    def _serve(self, desk: NodeAtPartition) -> Actor:
        yield Sleep(seconds=self._engine.between(0.0, HEARTBEAT_S))
        while True:
            if not desk.is_known:
                answer = yield self._call(desk, "register", _register(self._register()))
                self._heed(desk, answer)
                desk.is_known = not isinstance(answer, WireError)
                if isinstance(answer, Fenced):
                    return
                continue
            answer = yield self._call(
                desk, "beat", _beat(self.name, self.boot_id, self._versions()), tries=1
            )
            self._heed(desk, answer)
            if desk.is_known and self._free > 0:
                yield from self._lease(desk)
            yield Sleep(seconds=HEARTBEAT_S * self._engine.between(0.7, 1.1))

    def _lease(self, desk: NodeAtPartition) -> Actor:
        if not desk.asking:
            self._asked += 1
            desk.asking = f"{self.boot_id}/{self._asked}"
        request = _lease(self.name, self.boot_id, desk.asking, self._free, self._versions())
        answer = yield self._call(desk, "lease", request, tries=2)
        if answer is None:
            return  # asked again under the same name
        self._heed(desk, answer)
        if isinstance(answer, WireError):
            return
        desk.asking = ""
        for grant in answer[0]:
            self._begin(desk.machine, grant)

    def _call(self, desk: NodeAtPartition, name: str, command: Command, tries: int = 10**6) -> Call:
        return Call(target=desk.machine, name=f"{self.name} {name}", command=command, tries=tries)

    def _register(self) -> RegisterRequest:
        return RegisterRequest(
            node_id=self.name, boot_id=self.boot_id, capacity=self._plan.capacity, policies=()
        )

    def _versions(self) -> tuple[LiveVersion, ...]:
        return tuple(self._live.values())

    @property
    def _free(self) -> int:
        return self._plan.capacity - len(self.held)

    def _heed(self, desk: NodeAtPartition, answer: Any) -> None:
        """Orders ride on every answer."""
        if isinstance(answer, Fenced):
            self._engine.at(1.0, "", self._restart_if_current(self._lives))
        elif isinstance(answer, NotFound):
            desk.is_known = False
        elif isinstance(answer, tuple):
            _, wanted, revoked = cast(tuple[Any, Any, Any], answer)
            for version in wanted:
                if self._live.get(version.policy) != _live(version):
                    self._spawn(self._load(version))
            for name in revoked:
                if name in self.held and self._engine.chance(0.7):
                    self.held.pop(name).is_stopped = True

    def _restart_if_current(self, boot: int) -> Any:
        def restart() -> None:
            if boot == self._lives and not self.is_dead:
                self.start()

        return restart

    def _load(self, version: PublishedVersion) -> Actor:
        yield Sleep(seconds=self._engine.between(0.2, 2.0))
        known = self._live.get(version.policy)
        newest = (version.incarnation, version.number)
        if known is None or (known.incarnation, known.number) < newest:
            self._live[version.policy] = _live(version)

    # --- work -------------------------------------------------------------------------------------

    def _begin(self, machine: SimProcess, grant: Grant) -> None:
        name = row_id(grant.group_id, grant.slot, grant.epoch)
        if name in self.held:
            return
        self._laws.granted(grant, self.name)
        work = self.held[name] = Work(grant, machine, self._versions())
        self._spawn(self._work(name, work))

    def _work(self, name: RowId, work: Work) -> Actor:
        yield Sleep(seconds=min(25.0, self._engine.rng.lognormvariate(0.7, 0.8)))
        if work.is_stopped:
            return
        if self._engine.fault_chance(self._plan.faults.cut):
            yield Call(
                target=work.machine,
                name=f"{self.name} release {name}",
                command=_release(self.name, work.grant),
            )
            self.held.pop(name, None)
            return
        result = self._result(name, work)
        while True:
            status = yield Call(
                target=work.machine,
                name=f"{self.name} deliver {name}",
                command=_deliver(result),
            )
            if not isinstance(status, Busy):
                break
            yield Sleep(seconds=1.0)
        self._laws.answered(result.row, status)
        self.held.pop(name, None)
        if self._engine.chance(0.1):
            again = yield Call(
                target=work.machine, name=f"{self.name} again {name}", command=_deliver(result)
            )
            self._laws.answered(result.row, again, is_repeated=True)

    def _result(self, name: RowId, work: Work) -> Result:
        rng, plan = self._engine.rng, self._plan
        kind = OutcomeKind.COMPLETED
        if self._engine.fault_chance(plan.faults.failed):
            kind = OutcomeKind.FAILED
        elif self._engine.fault_chance(plan.faults.cut):
            kind = rng.choice((OutcomeKind.TRUNCATED, OutcomeKind.CANCELLED))
        outcome = Outcome(kind=kind, reason=WORD[kind])
        versions: dict[PolicyName, list[tuple[int, int]]] = {}
        for version in (*work.started_with, *self._versions()):
            found = versions.setdefault(version.policy, [])
            if (version.incarnation, version.number) not in found:
                found.append((version.incarnation, version.number))
        if len(versions) > 1 and rng.random() < 0.1:  # an agent that never called this model
            del versions[rng.choice(plan.policies)]
        reward = rng.choice((0.0, 0.0, 1.0)) if outcome.has_reward and not plan.judge else None
        if plan.judge and plan.num_policies > 1 and outcome.has_reward:
            reward = rng.choice((0.0, 1.0))
        row = RowRecord(
            summary=RowSummary(
                row_id=name,
                digest=f"{rng.getrandbits(64):x}",
                outcome=kind,
                reward=reward,
                sampled=dict.fromkeys(versions, 3),
                versions={policy: tuple(found) for policy, found in versions.items()},
                compute_cost=dict.fromkeys(versions, (5, 25)),
            ),
            group_id=work.grant.group_id,
            slot=work.grant.slot,
            epoch=work.grant.epoch,
            node_id=self.name,
            segment=1,
            offset=0,
            length=1,
            delivered_at=0.0,
        )
        return Result(row=row, outcome=outcome)


def _live(version: PublishedVersion) -> LiveVersion:
    return LiveVersion(
        policy=version.policy, incarnation=version.incarnation, number=version.number
    )


# --- what the service does with these calls -------------------------------------------------------


def _orders(machine: SimProcess, node_id: NodeId) -> tuple[Any, ...]:
    assert machine.host is not None
    partition = machine.host.partition
    return partition.target_versions, partition.node_registry.revoked(node_id)


def _register(body: RegisterRequest) -> Command:
    def run(machine: SimProcess, now: float) -> Any:
        assert machine.host is not None
        machine.host.partition.register(body, now)
        return ((), *_orders(machine, body.node_id))

    return Command(run=run, waits=False)


def _beat(node_id: NodeId, boot_id: str, live: tuple[LiveVersion, ...]) -> Command:
    def run(machine: SimProcess, now: float) -> Any:
        assert machine.host is not None
        machine.host.partition.heartbeat(node_id, boot_id, now, state=NodeState.LIVE, live=live)
        return ((), *_orders(machine, node_id))

    return Command(run=run, waits=False)


def _lease(
    node_id: NodeId, boot_id: str, request_id: str, count: int, live: tuple[LiveVersion, ...]
) -> Command:
    def run(machine: SimProcess, now: float) -> Any:
        assert machine.host is not None
        partition = machine.host.partition
        partition.ask(node_id, boot_id, request_id, now)
        grants = partition.lease(node_id, boot_id, request_id, count, live, now)
        return (grants, *_orders(machine, node_id))

    return Command(run=run)


def _release(node_id: NodeId, grant: Grant) -> Command:
    def run(machine: SimProcess, now: float) -> Any:
        assert machine.host is not None
        held = machine.host.partition.release(node_id, grant.group_id, grant.slot, grant.epoch, now)
        return "released" if held else "fenced"

    return Command(run=run)


def _deliver(result: Result) -> Command:
    row = result.row

    def run(machine: SimProcess, now: float) -> Any:
        assert machine.host is not None
        partition, gate = machine.host.partition, machine.host.gate
        if not partition.holds(row.node_id, row.group_id, row.slot, row.epoch):
            return lambda: _look(machine, row)
        versions = row.summary.versions
        if not all(
            gate.is_published(policy, *version)
            for policy, found in versions.items()
            for version in found
        ):
            if isinstance(machine, PartitionProcess):
                return Busy("home may know its version")
            partition.reject(row.group_id, row.slot, "version unknown here", now)
            return DeliveryStatus.INVALID
        return partition.deliver(row, result.outcome, now)

    return Command(run=run)


def _look(machine: SimProcess, row: RowRecord) -> DeliveryStatus:
    """No lease stands behind it: it was stored before, another was, or it is late."""
    known = machine.disk.of(RowRecord).get((row.row_id,))
    if known is None:
        return DeliveryStatus.FENCED
    same = known.summary.digest == row.summary.digest
    return DeliveryStatus.DUPLICATE if same else DeliveryStatus.CONFLICT
