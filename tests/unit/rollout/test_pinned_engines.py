# SPDX-License-Identifier: Apache-2.0
"""An evaluation has one version: it stays while the newest one moves, and while attempts run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
from tests.unit.rollout.fake_dataflow import POLICY, wanted
from tests.unit.rollout.polling import eventually
from tests.unit.rollout.test_weight_loader import Announced, AnyFolder

from penstock.dataflow.core.leasing import LiveVersion
from penstock.dataflow.service.nodes.messages import NodeDirectives
from penstock.errors import EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import GenerationRequest
from penstock.rollout import weight_loader
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.engines.simulated import LoadProfile, SimulatedEngine
from penstock.rollout.membership import Membership, NodeOrders
from penstock.rollout.pinned_engines import PinnedEngines
from penstock.rollout.weight_loader import Loader
from penstock.types import SamplingSpec, Version, view_ids

URL = "http://weights.invalid"


class AnnouncedBoth(Announced):
    """Records the pinned versions, too."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: tuple[LiveVersion, ...] = ()

    def announce_pinned(self, pinned: tuple[LiveVersion, ...]) -> None:
        self.pinned = pinned

    @property
    def numbers(self) -> tuple[int | None, list[int]]:
        """The newest number that is live, and the pinned ones."""
        newest = self.live[-1][POLICY] if self.live else None
        return newest, [one.number for one in self.pinned]


class Desk:
    def __init__(self, snapshot: Path) -> None:
        self.engines = EnginePools([POLICY], ScriptedEngine)
        self.pinned = PinnedEngines(
            lambda policies: EnginePools(policies, ScriptedEngine), max_running=8
        )
        self.announced, self.orders = AnnouncedBoth(), NodeOrders()
        self.gateway = Gateway(self.engines)
        self.loader = Loader(
            self.orders,
            cast(Membership, self.announced),
            self.engines,
            self.gateway,
            AnyFolder(snapshot),
            self.pinned,
            lambda: self.first_pinned.append(self.announced.numbers),
        )
        self.first_pinned: list[tuple[int | None, list[int]]] = []
        """What was live when the first evaluation could begin."""

    def order(self, newest: int, *pinned: int) -> None:
        directives = NodeDirectives(wanted=(wanted(newest),), pinned=tuple(map(wanted, pinned)))
        self.orders.apply(directives, URL)

    async def until(self, newest: int, *pinned: int) -> None:
        await eventually(lambda: self.announced.numbers == (newest, [*pinned]))


@pytest.fixture
def is_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_loader, "RETRY_S", 0.01)


@asynccontextmanager
async def running(snapshot: Path) -> AsyncGenerator[Desk]:
    desk = Desk(snapshot)
    loading = asyncio.create_task(desk.loader.run())
    try:
        yield desk
    finally:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await desk.pinned.free()
        await desk.engines.close()


async def sampled_by(gateway: Gateway) -> int:
    request = GenerationRequest([1, 2], SamplingSpec(max_tokens=2), policy=POLICY, session="s")
    [span] = (await gateway.generate(request)).spans
    return span.number


@pytest.mark.usefixtures("is_quick")
async def test_the_pinned_version_stays_while_the_newest_moves_and_is_freed(snapshot: Path) -> None:
    async with running(snapshot) as desk:
        desk.order(3, 1)
        await desk.until(3, 1)
        assert (await sampled_by(desk.gateway), await sampled_by(desk.pinned.gateway)) == (3, 1)
        desk.order(4, 1)
        await desk.until(4, 1)
        assert (await sampled_by(desk.gateway), await sampled_by(desk.pinned.gateway)) == (4, 1)
        desk.order(4)
        await desk.until(4)
        with pytest.raises(EngineError, match="no evaluation"):
            await sampled_by(desk.pinned.gateway)
        desk.order(5, 4)
        await desk.until(5, 4)
        assert await sampled_by(desk.pinned.gateway) == 4
        assert desk.first_pinned == [(3, [1])], "called once, and not before it can evaluate"


@pytest.mark.usefixtures("is_quick")
async def test_it_never_changes_under_a_running_attempt(snapshot: Path) -> None:
    async with running(snapshot) as desk:
        desk.order(3, 1)
        await desk.until(3, 1)
        with desk.pinned.in_use():
            desk.order(4, 2)
            await desk.until(4, 1)
            desk.order(5, 2)
            await desk.until(5, 1)  # a later round of the loader has ended
            assert await sampled_by(desk.pinned.gateway) == 1
        await desk.until(5, 2)


@pytest.mark.usefixtures("is_quick")
async def test_only_the_coordinator_ends_an_evaluation(snapshot: Path) -> None:
    """Another partition may have no question of it."""
    async with running(snapshot) as desk:
        desk.order(3, 1)
        await desk.until(3, 1)
        desk.orders.apply(NodeDirectives(wanted=(wanted(4),)))
        await desk.until(4, 1)


async def test_greedy_answers_of_the_simulated_engine_follow_from_the_prompt(
    snapshot: Path,
) -> None:
    async def answer(seed: int, temperature: float, prompt: list[int]) -> list[int]:
        engine = SimulatedEngine(LoadProfile(median_tokens=8), seed=seed)
        await engine.load(snapshot, Version(policy=POLICY, incarnation=1, number=0))
        sampling = SamplingSpec(max_tokens=16, temperature=temperature, seed=seed)
        request = GenerationRequest(prompt, sampling, policy=POLICY, session="s")
        found = await engine(request)
        await engine.close()
        return view_ids(found.sampled_ids).tolist()

    greedy = [await answer(seed, 0.0, [1, 2]) for seed in range(3)]
    assert greedy[0] == greedy[1] == greedy[2] != await answer(0, 0.0, [2, 1])
    assert await answer(0, 1.0, [1, 2]) != await answer(1, 1.0, [1, 2])
