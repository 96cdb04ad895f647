# SPDX-License-Identifier: Apache-2.0
"""A run in virtual time whose answers grow longer, on a rollout pool of a fixed size, under the
autoscaler, or under a schedule that knows the growth.

Dataflow core, balance report, three-zone rule and choice of nodes are the ones of real runs; nodes
and the trainer only take their time. A node is paid for from its order to its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from benchmarks.overlap_virtual import core_spec
from benchmarks.overlap_workload import Workload
from benchmarks.staleness import POLICY
from benchmarks.virtual_run import TOKEN_S, Answer, VirtualRun
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.records import Deletion, Record
from penstock.dataflow.report.balance import BalanceMonitor
from penstock.dataflow.report.figures import BalanceSettings
from penstock.dataflow.report.shape import ScalingBranch
from penstock.dataflow.service.operators.observe import observe_service
from penstock.dataflow.sources import Source
from penstock.fleet.autoscaler import NodeHealth, NodeType, PoolNode, ScalePlan, plan
from penstock.types import PolicyName

NODE = NodeType(name="node")
WORKLOAD = Workload(groups_per_batch=16, group_size=4, max_staleness=4)
OBSERVE_S = 2.0
"""Between two looks of the balance report, and two heartbeats of a node."""


def linear(progress: float) -> float:
    return progress


def late(progress: float) -> float:
    """Slowly at first: a constant rate of growth."""
    return (math.exp(2 * progress) - 1) / (math.exp(2) - 1)


def sudden(progress: float) -> float:
    """Nearly all of it within a fifth of the run."""
    return 1 / (1 + math.exp(-20 * (progress - 0.4)))


def rise_and_fall(progress: float) -> float:
    """Up until two thirds of the run, then half of the way down again."""
    return progress * 1.5 if progress < 2 / 3 else 1 - 1.5 * (progress - 2 / 3)


SHAPES: Mapping[str, Callable[[float], float]] = {
    "linear": linear,
    "late": late,
    "sudden": sudden,
    "rise and fall": rise_and_fall,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A run whose first steps need `small` nodes and whose longest answers need `large`."""

    shape: str = "linear"
    steps: int = 600
    small: int = 4
    large: int = 12
    utilisation: float = 0.95
    """Of either pool, at the step that it is sized for."""
    trainer_gpus: int = 4
    """Paid for as long as the run lasts: a pool that is too small pays for them for longer."""
    node_slots: int = 4
    start_s: float = 30.0
    """From the order of a node to its first lease: some two steps."""
    drain_s: float = 5.0
    """A node that is told to leave returns its work after this long."""
    workload: Workload = WORKLOAD

    @property
    def train_s(self) -> float:
        rows, slots = self.workload.rows_per_batch, self.small * self.node_slots
        return rows * self.workload.expected_tokens * TOKEN_S / slots / self.utilisation

    def growth(self, number: int) -> float:
        """Length of the answers of this version over that of the first."""
        reached = SHAPES[self.shape](min(1.0, number / self.steps))
        return 1 + (self.large / self.small - 1) * reached

    def needed(self, number: int) -> int:
        """Nodes that keep the trainer busy at this version, at the usual utilisation."""
        return math.ceil(self.small * self.growth(number) - 1e-9)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolResult:
    """One run."""

    seconds: float
    node_s: float
    """Of rollout nodes, from order to end."""
    wait_s: float
    """Of the trainer for batches."""
    sizes: Sequence[tuple[float, int]]
    """Nodes ordered and not yet ended, from each moment on."""
    trainer_gpus: int

    @property
    def node_hours(self) -> float:
        """Of all machines, trainer included."""
        return (self.node_s + self.trainer_gpus * self.seconds) / 3600

    @property
    def wait_fraction(self) -> float:
        return self.wait_s / self.seconds

    @property
    def reversals(self) -> int:
        """How often the pool changed direction."""
        sizes = [size for _, size in self.sizes]
        moves = [b - a for a, b in pairwise(sizes) if a != b]
        return sum((a > 0) != (b > 0) for a, b in pairwise(moves))


@dataclass(slots=True)
class _Pool:
    """The nodes of one run, and what they cost."""

    run: VirtualRun
    scenario: Scenario
    ordered_at: dict[str, float] = field(default_factory=dict[str, float])
    starting: set[str] = field(default_factory=set[str])
    leaving: set[str] = field(default_factory=set[str])
    node_s: float = 0.0
    sizes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    _number: int = 0

    @property
    def present(self) -> list[str]:
        return [name for name in self.ordered_at if name not in self.leaving]

    def nodes(self) -> list[PoolNode]:
        return [
            PoolNode(
                name=name,
                node_type=NODE.name,
                health=NodeHealth.STARTING if name in self.starting else NodeHealth.SERVING,
            )
            for name in self.present
        ]

    def carry_out(self, planned: ScalePlan) -> None:
        for _ in planned.start:
            self.start(self.scenario.start_s)
        for retired in planned.retire:
            self._retire(retired.name)

    def start(self, delay_s: float) -> None:
        name = f"node-{self._number}"
        self._number += 1
        self.ordered_at[name] = self.run.now
        if delay_s:
            self.starting.add(name)
            self.run.at(self.run.now + delay_s, lambda: self._serve(name))
        else:
            self._serve(name)
        self._note_size()

    def _serve(self, name: str) -> None:
        self.starting.discard(name)
        if name in self.ordered_at:
            self.run.join(name, self.scenario.node_slots)

    def _retire(self, name: str) -> None:
        if name in self.starting:
            self._end(name)
            return
        self.leaving.add(name)
        self.run.stop_leasing(name)
        self.run.at(self.run.now + self.scenario.drain_s, lambda: self._leave(name))
        self._note_size()

    def _leave(self, name: str) -> None:
        self.run.leave(name)
        self.leaving.discard(name)
        self._end(name)

    def _end(self, name: str) -> None:
        self.node_s += self.run.now - self.ordered_at.pop(name)
        self._note_size()

    def close(self) -> None:
        self.node_s += sum(self.run.now - at for at in self.ordered_at.values())

    def _note_size(self) -> None:
        self.sizes.append((self.run.now, len(self.present)))


class _Trainer:
    """Trains each batch for a fixed time, and tells the balance report when it asks and gets."""

    def __init__(self, run: VirtualRun, monitor: BalanceMonitor, train_s: float) -> None:
        self.consumer = run.coordinator.consumers[POLICY]
        self.wait_s = 0.0
        self._run, self._monitor, self._train_s = run, monitor, train_s
        self._free_since: float | None = run.now
        self._is_asked = False

    def poll(self) -> None:
        run, seq = self._run, self.consumer.last_sealed + 1
        if self._free_since is None:
            return
        if not self._is_asked:
            self._monitor.batch_requested(POLICY, seq, run.now)
            self._is_asked = True
        if run.sealing.seal(self.consumer, seq, run.now) is None:
            return
        run.router.run(run.now)
        self._monitor.served(POLICY, seq, run.now)
        self.wait_s += run.now - self._free_since
        self._free_since, self._is_asked = None, False
        run.at(run.now + self._train_s, self._trained)

    def _trained(self) -> None:
        self._run.commit(self.consumer)
        self._run.publish(POLICY)
        self._free_since = self._run.now


Steer = Callable[[_Pool, BalanceMonitor, int], int | None]
"""The wanted size, given the pool, the report and the version; None: as it is."""


def fixed(pool: _Pool, monitor: BalanceMonitor, number: int) -> int | None:
    return None


def make_oracle(scenario: Scenario) -> Steer:
    """Knows how long answers will be when the nodes that it orders now have started."""
    ahead = math.ceil(scenario.start_s / scenario.train_s)

    def steer(pool: _Pool, monitor: BalanceMonitor, number: int) -> int | None:
        return scenario.needed(min(scenario.steps, number + ahead))

    return steer


def make_autoscaler() -> Steer:
    """Follows each decision of the balance report once."""
    followed_at = 0.0

    def steer(pool: _Pool, monitor: BalanceMonitor, number: int) -> int | None:
        nonlocal followed_at
        action = monitor.memory.last_action
        if action is None or action.at <= followed_at:
            return None
        followed_at = action.at
        assert action.branch is not ScalingBranch.HOLD
        return action.target_gpus

    return steer


def simulate(
    scenario: Scenario, num_nodes: int, steer: Steer, terms: BalanceSettings
) -> PoolResult:
    """Run all steps with this pool at the start."""
    workload = scenario.workload

    def answer(grant: Grant) -> Answer:
        issue = int(grant.group_id.partition("-")[2])
        number = run.coordinator.lineages[POLICY].number
        tokens = round(workload.tokens(issue, grant.slot) * scenario.growth(number))
        return Answer(tokens=max(1, tokens), reward=float(grant.slot))

    source = Source(name="train", weight=1.0, make=lambda n, seed: {"n": n}, limit=None)
    run = VirtualRun(
        core_spec(
            scenario.workload, steps=scenario.steps, max_attempts=1000, seed=scenario.workload.seed
        ),
        [source],
        answer,
        tick_s=OBSERVE_S,
    )
    consumers = run.coordinator.consumers

    def number_of(policy: PolicyName, incarnation: int, number: int) -> int:
        return consumers[policy].lineage.effective_number(incarnation, number)

    monitor = BalanceMonitor("virtual", consumers, terms, number_of, run.core.manifests, run.now)

    def listen(record: Record | Deletion) -> None:
        monitor.on_records([record])

    run.tally.listeners.append(listen)
    pool = _Pool(run, scenario)
    trainer = _Trainer(run, monitor, scenario.train_s)
    began_at = run.now
    run.take_over(POLICY)
    for _ in range(num_nodes):
        pool.start(0.0)
    wanted: int | None = None

    def look() -> None:
        nonlocal wanted
        assert run.core.host is not None
        monitor.look(observe_service(run.coordinator, run.core.host), run.now)
        found = steer(pool, monitor, trainer.consumer.lineage.number)
        wanted = wanted if found is None else found
        if wanted is not None:
            pool.carry_out(plan(wanted, pool.nodes(), [NODE]))
        run.at(run.now + OBSERVE_S, look)

    run.after_settle.append(trainer.poll)
    run.at(run.now, look)
    run.run(lambda: trainer.consumer.lineage.number >= scenario.steps)
    pool.close()
    return PoolResult(
        seconds=run.now - began_at,
        node_s=pool.node_s,
        wait_s=trainer.wait_s,
        sizes=[(at - began_at, size) for at, size in pool.sizes],
        trainer_gpus=scenario.trainer_gpus,
    )
