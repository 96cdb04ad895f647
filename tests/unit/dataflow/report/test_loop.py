# SPDX-License-Identifier: Apache-2.0
"""The rule in a closed loop: a pool that obeys every report, with nodes that take three windows to
start, under a load that doubles and halves. It must find its size and stay there; without the
brakes it must not, or this test could not tell.

A model, not a service: a step needs `load` GPU-seconds of rollout and `TRAIN_S` of training, and
whichever is longer sets the pace."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from tests.unit.dataflow.report.report_factories import figures, flow, node_figures, policy_figures

from penstock.dataflow.report.build import make_report, rule_memory
from penstock.dataflow.report.figures import (
    BalanceSettings,
    Figures,
    NodeActivity,
    NodeFigures,
    RuleMemory,
    StepTiming,
)
from penstock.dataflow.report.shape import WindowReport

TRAIN_S = 10.0
STEPS = 10
BATCH = 10_000
"""Tokens."""
DELAY_WINDOWS = 3
"""From an order to its effect: a node must start, or finish what it holds."""
DAMPED = BalanceSettings()
UNDAMPED = replace(DAMPED, cooldown_windows=0.0, cooldown_starts=0.0)


@dataclass(slots=True)
class World:
    terms: BalanceSettings
    serving: int = 8
    is_paced: bool = True
    """Nodes stop when no more data is needed; otherwise they continue and waste it."""
    are_joins_seen: bool = False
    """New nodes have joined and are starting; otherwise they are not visible yet."""
    memory: RuleMemory = field(default_factory=RuleMemory)
    now: float = 0.0
    orders: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Window at whose end it takes effect, and by how many GPUs."""
    sizes: list[int] = field(default_factory=list[int])

    def window(self, load: float, index: int) -> None:
        """Run ten steps under this load, then apply the decision of the report."""
        roll_s = load / self.serving
        step_s = max(TRAIN_S, roll_s)
        busy = roll_s / step_s
        wait_s = step_s - TRAIN_S
        began_at, self.now = self.now, self.now + STEPS * step_s
        entered = STEPS * BATCH if self.is_paced else int(STEPS * BATCH / busy)
        policy = policy_figures(
            samples=(StepTiming(wait_s=wait_s, step_s=step_s),) * STEPS,
            window=flow(entered, entered, STEPS * BATCH),
        )
        idle = {"waiting": (self.now - began_at) * (1 - busy)} if self.is_paced else {}
        account = {"rolling_out": (self.now - began_at) * busy, **idle}
        given = figures(
            window=WindowReport(index=index, opened_at=began_at, closed_at=self.now, complete=True),
            policies=(policy,),
            nodes=self._nodes(account),
            start_s_p90=DELAY_WINDOWS * (self.now - began_at),
            memory=self.memory,
        )
        self._obey(given)

    def _nodes(self, account: dict[str, float]) -> tuple[NodeFigures, ...]:
        serving = [node_figures(f"n{i}", window_account=account) for i in range(self.serving)]
        starting = sum(max(0, gpus) for _, gpus in self.orders) if self.are_joins_seen else 0
        joined = [
            node_figures(f"s{i}", activity=NodeActivity.STARTING, window_account={})
            for i in range(starting)
        ]
        return (*serving, *joined)

    def _obey(self, given: Figures) -> None:
        report = make_report(given, self.terms, self.now)
        self.memory = rule_memory(report)
        index, delta = given.window.index, report.decision.estimated_delta_gpus
        self.orders.append((index + DELAY_WINDOWS, delta))
        self.serving = max(1, self.serving + sum(gpus for due, gpus in self.orders if due == index))
        self.orders = [order for order in self.orders if order[0] > index]
        self.sizes.append(self.serving)


def run(world: World, load: float, windows: int) -> list[int]:
    """Sizes of the pool, window by window, under one load."""
    first = len(world.sizes)
    for index in range(first, first + windows):
        world.window(load, index)
    return world.sizes[first:]


def reversals(sizes: list[int]) -> int:
    """How often the pool changed direction."""
    moves = [b - a for a, b in pairwise(sizes) if a != b]
    return sum((a > 0) != (b > 0) for a, b in pairwise(moves))


def settles(sizes: list[int], windows: int = 20) -> bool:
    return len(set(sizes[-windows:])) == 1


LOADS = [80.0, 160.0, 80.0, 240.0, 40.0]
"""GPU-seconds of rollout per step, each for sixty windows: 8 GPUs keep pace with the first."""


@pytest.mark.parametrize("are_joins_seen", [False, True])
@pytest.mark.parametrize("is_paced", [True, False])
def test_the_pool_finds_its_size_and_stays(is_paced: bool, are_joins_seen: bool) -> None:
    world = World(terms=DAMPED, is_paced=is_paced, are_joins_seen=are_joins_seen)
    for load in LOADS:
        sizes = run(world, load, 60)
        enough = load / TRAIN_S
        assert reversals(sizes) <= 1, f"load {load}: {sizes}"
        assert settles(sizes), f"load {load}: {sizes}"
        assert sizes[-1] >= 0.9 * enough, "trainers wait at most a tenth of their time"
        assert sizes[-1] <= 1.15 * enough + 1, "and hardly a GPU idles"


def test_without_a_cooldown_it_oscillates() -> None:
    """The same loop and loads, without the cooldown."""
    world = World(terms=UNDAMPED)
    run(world, 80.0, 20)
    sizes = run(world, 160.0, 60)
    assert reversals(sizes) > 2 and not settles(sizes), f"{sizes}"
    assert max(sizes) > 1.3 * max(run(_settled(DAMPED), 160.0, 60)), f"{sizes}"


def _settled(terms: BalanceSettings) -> World:
    world = World(terms=terms)
    run(world, 80.0, 20)
    return world


def test_one_low_window_does_not_shrink_the_pool() -> None:
    world = _settled(DAMPED)
    before = world.serving
    run(world, 20.0, 1)
    assert run(world, 80.0, 10)[-1] == before
