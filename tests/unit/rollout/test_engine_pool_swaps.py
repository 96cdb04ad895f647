# SPDX-License-Identifier: Apache-2.0
"""Rolling swaps: new weights are loaded a few engines at a time, each must verify them before it
serves, and a failure stays on its engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import pytest
from tests.unit.rollout.fake_dataflow import wanted
from tests.unit.rollout.killable_engine import KillableEngine, Paused
from tests.unit.rollout.polling import eventually
from tests.unit.rollout.test_engine_pool import POLICY, PROMPT, SPEC, version
from tests.unit.rollout.test_weight_loader import Announced, AnyFolder

from penstock.dataflow.service.nodes.messages import NodeDirectives
from penstock.errors import EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import GenerationRequest
from penstock.rollout import weight_loader as loader_module
from penstock.rollout.engine import Engine
from penstock.rollout.engine_pool import EnginePool, EnginePools
from penstock.rollout.membership import Membership, NodeOrders
from penstock.rollout.weight_loader import PROBE_TOKENS, Loader
from penstock.types import Version


async def served(pool: EnginePool, num_sessions: int = 20) -> set[int]:
    """The version numbers that answers are sampled from now."""
    answers = await asyncio.gather(
        *(
            pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session=f"s{n}"))
            for n in range(num_sessions)
        )
    )
    return {span.number for answer in answers for span in answer.spans}


@pytest.mark.parametrize(
    ("num_engines", "max_paused", "most"),
    [(1, 0.25, 1), (3, 0.25, 1), (4, 0.25, 1), (8, 0.25, 2), (4, 0.5, 2), (4, 1.0, 4), (7, 0.3, 2)],
)
async def test_so_many_engines_are_paused_at_once(
    snapshot: Path, num_engines: int, max_paused: float, most: int
) -> None:
    paused = Paused()
    engines = [KillableEngine(paused) for _ in range(num_engines)]
    pool = EnginePool(engines, max_paused=max_paused)
    await pool.load(snapshot, version(0))
    assert paused.peak == num_engines, "nobody waits for engines that serve nobody"
    assert (pool.stats.peak_paused, pool.stats.num_swaps) == (0, 0)
    paused.peak = 0
    for number in range(1, 6):
        await pool.load(snapshot, version(number))
        assert pool.live == version(number)
    assert paused.peak == pool.stats.peak_paused == most
    assert pool.stats.num_swaps == len(pool.stats.swap_s) == 5 * num_engines
    assert all(swap_s > 0 for swap_s in pool.stats.swap_s)


async def test_new_requests_avoid_the_engine_that_is_swapped(snapshot: Path) -> None:
    engines = [KillableEngine() for _ in range(4)]
    pool = EnginePool(engines)
    await pool.load(snapshot, version(0))
    for engine in engines:
        engine.may_load.clear()
    loading = asyncio.create_task(pool.load(snapshot, version(1)))
    await eventually(lambda: any(engine.paused.now for engine in engines))
    assert await served(pool) == {0}
    (swapped,) = [engine for engine in engines if engine.paused.now]
    assert not swapped.asked
    assert all(engine.asked for engine in engines if engine is not swapped)
    for engine in engines:
        engine.may_load.set()
    await loading
    assert await served(pool) == {1}
    assert swapped.asked, "it is routed to again"


async def test_an_engine_that_cannot_load_serves_its_old_version(snapshot: Path) -> None:
    engines = [KillableEngine() for _ in range(4)]
    pool = EnginePool(engines)
    await pool.load(snapshot, version(0))
    engines[1].load_fails = True
    with pytest.raises(EngineError, match="failed on 1 of 4 engines: no memory"):
        await pool.load(snapshot, version(1))
    assert pool.live == version(0), "the oldest that is served"
    assert pool.needs_load(version(1))
    assert await served(pool) == {0, 1}
    engines[1].load_fails = False
    await pool.load(snapshot, version(1))
    assert pool.live == version(1)
    assert not pool.needs_load(version(1))
    assert [engine.loads for engine in engines] == [[version(0), version(1)]] * 4
    assert await served(pool) == {1}


class Proof:
    """Fails for the engines it doubts, and counts calls."""

    def __init__(self) -> None:
        self.unverified: list[Engine] = []
        self.num_proofs = 0

    async def __call__(self, engine: Engine, version: Version) -> None:
        self.num_proofs += 1
        await asyncio.sleep(0.001)
        if engine in self.unverified:
            raise EngineError("not what it should be")


async def test_a_version_that_fails_its_proof_goes_no_further(snapshot: Path) -> None:
    engines = [KillableEngine() for _ in range(4)]
    pool, proof = EnginePool(engines), Proof()
    await pool.load(snapshot, version(0), verify=proof)
    proof.unverified = [*engines]
    for _ in range(4):  # nor after retries
        with pytest.raises(EngineError, match="not what it should be"):
            await pool.load(snapshot, version(1), verify=proof)
    assert [engine.live for engine in engines].count(version(1)) == 1
    assert pool.stats.num_serving == 3
    assert await served(pool) == {0}
    await pool.load(snapshot, version(2), verify=Proof())
    await eventually(lambda: pool.stats.num_serving == 4)
    assert await served(pool) == {2}


async def test_a_version_that_others_proved_is_not_held_up_by_one_engine(snapshot: Path) -> None:
    engines = [KillableEngine() for _ in range(4)]
    pool, proof = EnginePool(engines), Proof()
    await pool.load(snapshot, version(0), verify=proof)
    proof.unverified = [engines[1]]
    await pool.load(snapshot, version(1), verify=proof)
    assert pool.live == version(1)
    assert pool.needs_load(version(1))
    assert await served(pool) == {1}
    assert not engines[1].asked
    proof.unverified = []
    await pool.load(snapshot, version(1), verify=proof)
    assert pool.stats.num_serving == 4


async def test_the_only_engine_serves_nobody_until_it_proves_its_version(snapshot: Path) -> None:
    engine, proof = KillableEngine(), Proof()
    pool = EnginePool([engine], hold_s=20.0)
    await pool.load(snapshot, version(0), verify=proof)
    proof.unverified = [engine]
    with pytest.raises(EngineError, match="not what"):
        await pool.load(snapshot, version(1), verify=proof)
    assert pool.live is None
    call = asyncio.create_task(pool(GenerationRequest(PROMPT, SPEC, policy=POLICY, session="s")))
    await asyncio.sleep(0.02)
    assert not engine.asked
    proof.unverified = []
    await pool.load(snapshot, version(1), verify=proof)
    assert [span.number for span in (await call).spans] == [1]


async def test_nobody_waits_for_an_engine_that_starts(snapshot: Path) -> None:
    engines = [KillableEngine() for _ in range(3)]
    pool = EnginePool(engines)
    await pool.load(snapshot, version(0))
    slow = engines[2]
    slow.live = None
    slow.may_load.clear()
    for number in (1, 2):
        async with asyncio.timeout(60):
            await pool.load(snapshot, version(number))
        assert pool.live == version(number)
        assert not pool.needs_load(version(number)), "it is on its way"
    assert await served(pool) == {2}
    slow.may_load.set()
    await eventually(lambda: slow.live is not None)
    assert slow.loads == [version(0), version(1)], "each start is finished before the next"
    assert pool.live == version(1)
    assert pool.needs_load(version(2))
    await pool.load(snapshot, version(2))
    assert await served(pool) == {2}
    assert pool.stats.num_serving == 3


async def test_closing_ends_a_start(snapshot: Path) -> None:
    engines = [KillableEngine() for _ in range(2)]
    pool = EnginePool(engines)
    await pool.load(snapshot, version(0))
    engines[0].live = None
    engines[0].may_load.clear()
    await pool.load(snapshot, version(1))
    async with asyncio.timeout(60):
        await pool.close()
    assert engines[0].paused.now == 0


async def test_the_loader_probes_every_engine_and_brings_back_the_lost(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "RETRY_S", 0.01)
    made: list[KillableEngine] = []

    def make() -> KillableEngine:
        made.append(KillableEngine())
        return made[-1]

    engines = EnginePools([POLICY], make, num_engines=3)
    announced, orders = Announced(), NodeOrders()
    membership = cast(Membership, announced)
    loader = Loader(orders, membership, engines, Gateway(engines), AnyFolder(snapshot))
    running = asyncio.create_task(loader.run())
    orders.apply(NodeDirectives(wanted=(wanted(0),)))
    await eventually(lambda: announced.live)
    assert [len(engine.asked) for engine in made] == [1, 1, 1]
    assert {spec.max_tokens for engine in made for _, spec in engine.asked} == {PROBE_TOKENS}
    orders.apply(NodeDirectives(wanted=(wanted(1),)))
    await eventually(lambda: announced.live[-1] == {POLICY: 1})
    assert [len(engine.asked) for engine in made] == [2, 2, 2]
    made[1].live = None
    await eventually(lambda: made[1].live == Version(policy=POLICY, incarnation=1, number=1))
    await eventually(lambda: engines.stats()[POLICY].num_serving == 3)
    assert [len(engine.asked) for engine in made] == [2, 3, 2], "the others are left alone"
    assert {live[POLICY] for live in announced.live} == {0, 1}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await engines.close()
