# SPDX-License-Identifier: Apache-2.0
"""A version is announced only after its engine has answered a fixed prompt with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import structlog
from tests.unit.rollout.fake_dataflow import POLICY, wanted
from tests.unit.rollout.polling import eventually
from tests.unit.rollout.test_node import bench

from penstock.dataflow.core.leasing import LiveVersion
from penstock.dataflow.service.nodes.messages import NodeDirectives
from penstock.errors import EngineError, WeightsError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout import weight_loader as module
from penstock.rollout.engine import Engine
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.engines.hf import HfEngine
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.engines.simulated import LoadProfile, SimulatedEngine
from penstock.rollout.membership import Membership, NodeOrders
from penstock.rollout.weight_loader import Loader, probe_error
from penstock.types import (
    FinishReason,
    PolicyName,
    PublishedVersion,
    SamplingSpec,
    Version,
    VersionSpan,
    log_probs,
    token_ids,
    view_ids,
)

Spoil = Callable[[Completion], Completion]
VERSION = Version(policy=POLICY, incarnation=1, number=3)


class SpoiltEngine(ScriptedEngine):
    """Its answers under version 1 are wrong until it is repaired."""

    def __init__(self, spoil: Spoil) -> None:
        super().__init__()
        self.spoil: Spoil | None = spoil
        self.asked: list[tuple[Sequence[int], SamplingSpec]] = []

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.asked.append((request.prompt_ids, request.sampling))
        found = await super().__call__(request)
        assert self.live is not None
        return self.spoil(found) if self.spoil and self.live.number == 1 else found


def nan(answer: Completion) -> Completion:
    num = len(view_ids(answer.sampled_ids))
    return replace(answer, logprobs=log_probs([*[0.0] * (num - 1), float("nan")]))


def of_another_version(answer: Completion) -> Completion:
    return replace(answer, spans=tuple(replace(span, number=0) for span in answer.spans))


def failing(answer: Completion) -> Completion:
    raise EngineError("out of memory")


@pytest.mark.parametrize("spoil", [nan, of_another_version, failing])
async def test_a_version_that_fails_its_probe_is_announced_when_it_passes(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch, spoil: Spoil
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    engine = SpoiltEngine(spoil)
    with structlog.testing.capture_logs() as lines:
        async with bench(tmp_path, snapshot, make_engine=lambda: engine) as desk:
            await eventually(lambda: desk.dataflow.beats and desk.dataflow.beats[-1].live)
            await desk.dataflow.order(NodeDirectives(wanted=(wanted(1),)))
            await eventually(lambda: len(engine.asked) >= 4)
            num_beats = len(desk.dataflow.beats)
            await eventually(lambda: len(desk.dataflow.beats) > num_beats + 1)
            assert desk.dataflow.beats[-1].live[0].number == 0
            engine.spoil = None
            await eventually(lambda: desk.dataflow.beats[-1].live[0].number == 1)
    assert len([line for line in lines if line["event"] == "load failed"]) >= 3
    assert {tuple(prompt_ids) for prompt_ids, _ in engine.asked} == {tuple(engine.asked[0][0])}
    assert engine.asked[0][0] and all(0 <= token < 11 for token in engine.asked[0][0])
    assert {spec.temperature for _, spec in engine.asked} == {0.0}


def answer(*logprobs: float, number: int = 3) -> Completion:
    num = len(logprobs)
    span = VersionSpan(start=0, end=num, incarnation=1, number=number)
    return Completion(
        sampled_ids=token_ids(range(num)),
        logprobs=log_probs(logprobs),
        spans=(span,) if num else (),
        finish=FinishReason.LENGTH,
    )


def test_what_is_wrong_with_an_answer() -> None:
    assert probe_error(answer(-1.0, 0.0), VERSION) is None
    assert "log-probs are" in (probe_error(answer(-1.0, float("-inf")), VERSION) or "")
    assert "log-probs are" in (probe_error(answer(float("nan")), VERSION) or "")
    assert "sampled by [(1, 2)]" in (probe_error(answer(-1.0, number=2), VERSION) or "")
    assert "sampled by []" in (probe_error(answer(), VERSION) or "")
    short = replace(answer(-1.0, -1.0), logprobs=log_probs([-1.0]))
    assert "2 tokens have 1" in (probe_error(short, VERSION) or "")


async def test_an_engine_that_never_answers_is_not_waited_for(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROBE_S", 0.1)
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    slow = SimulatedEngine(LoadProfile(first_token_s=1000.0))
    with structlog.testing.capture_logs() as lines:
        async with bench(tmp_path, snapshot, make_engine=lambda: slow) as desk:
            await eventually(lambda: desk.fetch.num_tries >= 2)
            assert not any(beat.live for beat in desk.dataflow.beats)
    assert "probe of" in next(line for line in lines if line["event"] == "load failed")["error"]


@pytest.mark.parametrize("make", [ScriptedEngine, SimulatedEngine, HfEngine])
async def test_every_engine_passes(
    tmp_path: Path, snapshot: Path, make: Callable[[], Engine]
) -> None:
    if make is HfEngine:
        pytest.importorskip("transformers")
        from tests.unit.rollout.engines import tiny_qwen3

        tiny_qwen3.write_snapshot(snapshot, seed=0)
    async with bench(tmp_path, snapshot, make_engine=make) as desk, asyncio.timeout(60):
        await eventually(lambda: desk.dataflow.beats and desk.dataflow.beats[-1].live, timeout_s=60)


class Announced:
    """Replaces the membership: records announcements in order."""

    def __init__(self) -> None:
        self.live: list[dict[PolicyName, int]] = []

    def announce(self, live: tuple[LiveVersion, ...], *, is_ready: bool) -> None:
        self.live.append({one.policy: one.number for one in live})


class AnyFolder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.is_damaged = False

    async def __call__(self, weights_url: str, target: PublishedVersion) -> Path:
        return self._folder

    def require_unchanged(self, folder: Path) -> None:
        if self.is_damaged:
            raise WeightsError(f"{folder} was written to")

    def make_patch(self, base: Path, folder: Path) -> None:
        return None

    def prune_except(self, keep: Collection[str]) -> None:
        return None

    async def close(self) -> None:
        return None


async def test_another_policy_does_not_announce_what_failed_its_probe(snapshot: Path) -> None:
    other = PolicyName("other")
    makers = iter([SpoiltEngine(nan), ScriptedEngine()])
    engines = EnginePools([POLICY, other], lambda: next(makers))
    announced, orders = Announced(), NodeOrders()
    loader = Loader(
        orders,
        cast(Membership, announced),
        engines,
        Gateway(engines),
        AnyFolder(snapshot),
    )
    running = asyncio.create_task(loader.run())
    orders.apply(NodeDirectives(wanted=(wanted(0), replace(wanted(0), policy=other))))
    await eventually(lambda: announced.live and len(announced.live[-1]) == 2)
    orders.apply(NodeDirectives(wanted=(wanted(1), replace(wanted(1), policy=other))))
    await eventually(lambda: announced.live[-1].get(other) == 1)
    assert POLICY not in announced.live[-1], "its engine holds what failed; nobody is sent there"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_weights_that_changed_during_their_load_are_loaded_again(
    snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    engines, fetch = EnginePools([POLICY], ScriptedEngine), AnyFolder(snapshot)
    announced, orders = Announced(), NodeOrders()
    loader = Loader(orders, cast(Membership, announced), engines, Gateway(engines), fetch)
    running = asyncio.create_task(loader.run())
    orders.apply(NodeDirectives(wanted=(wanted(0),)))
    await eventually(lambda: announced.live == [{POLICY: 0}])
    fetch.is_damaged = True
    with structlog.testing.capture_logs() as logs:
        orders.apply(NodeDirectives(wanted=(wanted(1),)))
        await eventually(lambda: len([entry for entry in logs if "written to" in str(entry)]) > 1)
    assert announced.live == [{POLICY: 0}]
    fetch.is_damaged = False
    await eventually(lambda: announced.live[-1] == {POLICY: 1})
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
