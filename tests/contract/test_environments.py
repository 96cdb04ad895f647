# SPDX-License-Identifier: Apache-2.0
"""What every environment does behind its bridge, in the sandbox: a fake of ours, one on the code
that all bridges share, and the real libraries (`make setup-envs`)."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.unit.rollout.environments.test_environments import FAKE
from tests.unit.rollout.environments.test_serving import BRIDGES, SCRIPT
from tests.unit.rollout.fake_dataflow import POLICY, facts, task
from tests.unit.rollout.polling import eventually, running
from tests.unit.rollout.snapshot_files import write_snapshot
from tests.unit.rollout.test_attempt import GRANT, NoTurns, loaded_engine

from penstock.config.environments import EnvironmentConfig
from penstock.dataflow.service.build_environments import environment_info
from penstock.dataflow.service.nodes.messages import SourceInfo
from penstock.gateway.gateway import Gateway
from penstock.gateway.renderer import Renderer
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.environments.environments import Environments, environment_python
from penstock.rollout.environments.session import EnvironmentSession
from penstock.rollout.environments.types import Observation
from penstock.rollout.isolation import Isolation
from penstock.rollout.recorder import Recorder
from penstock.types import JsonObject, NodeId, SamplingSpec, Task, Trajectory

MODULES = str(Path(__file__).parent / "environment_modules")
DIRECTIONS = {"left": 0, "down": 1, "right": 2, "up": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """An environment, and how to win it."""

    config: JsonObject
    play: Callable[[Observation, int], str]
    """The action that wins, given the observation and the number of steps so far."""
    payload: JsonObject = field(default_factory=lambda: {"index": 3, "seed": 5})

    def source(self, name: str) -> SourceInfo:
        config = EnvironmentConfig.model_validate(self.config)
        return SourceInfo(
            name=name,
            workflow="tests.unit.rollout.environments.env_workflows:play_alone",
            reward="",
            sampling=SamplingSpec(max_tokens=3),
            env=environment_info(config),
        )

    def task(self, source: str) -> Task:
        return replace(task(), source=source, payload=dict(self.payload))


def _say_down(seen: Observation, num_steps: int) -> str:
    return "down"


def _cross_the_lake(seen: Observation, num_steps: int) -> str:
    """The shortest way over the map of 4 × 4."""
    path = ("down", "down", "right", "right", "down", "right")
    return f"I think I should go {path[min(num_steps, 5)].upper()}."


def _guess(seen: Observation, num_steps: int) -> str:
    return json.dumps({"guess": num_steps + 1})


def _count_legs(seen: Observation, num_steps: int) -> str:
    return "<answer>0</answer>"


FROZEN_LAKE = Game(
    config={
        "gymnasium": "FrozenLake-v1",
        "options": {"is_slippery": False},
        "actions": DIRECTIONS,
    },
    play=_cross_the_lake,
)
GUESS = Game(config={"openenv": "guess_env:app", "path": MODULES}, play=_guess)
LEGS = Game(config={"reasoning_gym": "leg_counting"}, play=_count_legs)
ECHO = Game(config={"verifiers": "echo-taskset", "path": MODULES}, play=_say_down)
GAMES = {
    "fake": Game(config={"command": [sys.executable, FAKE]}, play=_say_down),
    "serving": Game(config={"command": [sys.executable, SCRIPT, BRIDGES]}, play=_say_down),
    "gymnasium": FROZEN_LAKE,
    "openenv": GUESS,
    "reasoning_gym": LEGS,
}
LIBRARIES = ("gymnasium", "openenv", "reasoning_gym")
EVERY = [pytest.param(n, marks=pytest.mark.envs if n in LIBRARIES else ()) for n in GAMES]


@asynccontextmanager
async def opened(game: Game) -> AsyncGenerator[Callable[[], EnvironmentSession]]:
    gateway = Gateway(lambda request: None)  # type: ignore[arg-type, return-value]
    environments = Environments([game.source("x")], Isolation(), Endpoint(gateway))
    names = iter(range(1000))

    def session() -> EnvironmentSession:
        name = f"e{next(names)}"
        found = environments.session(game.task("x"), name=name, api_key="", policy="")
        assert found is not None
        return found

    try:
        yield session
    finally:
        await environments.close()


async def play(session: EnvironmentSession, game: Game) -> tuple[list[str], float | None]:
    seen = await session.reset()
    texts = [seen.text]
    while not seen.done and len(texts) < 20:
        seen = await session.step(game.play(seen, len(texts) - 1))
        texts.append(seen.text)
    assert seen.done
    score = await session.score()
    session.close()
    return texts, score


@pytest.mark.parametrize("name", EVERY)
async def test_an_episode_is_played_to_its_end_and_repeats(name: str) -> None:
    game = GAMES[name]
    async with opened(game) as session:
        first, again = await play(session(), game), await play(session(), game)
    assert first == again and first[0][0]
    assert first[1] == pytest.approx(1.0) or name == "reasoning_gym"


@pytest.mark.parametrize("name", EVERY)
async def test_nonsense_is_answered_and_the_episode_goes_on(name: str) -> None:
    game = GAMES[name]
    async with opened(game) as session:
        one = session()
        await one.reset()
        for text in ("", "\ud83d\ude00 \u0000 {", "x" * 100_000, '{"guess": "a"}'):
            seen = await one.step(text)
            assert name == "reasoning_gym" or not seen.done
        assert one.failure is None


@pytest.mark.parametrize("name", EVERY)
async def test_eight_episodes_at_once(name: str) -> None:
    game = GAMES[name]
    async with opened(game) as session:
        found = await asyncio.gather(*(play(session(), game) for _ in range(8)))
    assert all(one == found[0] for one in found)


@pytest.mark.parametrize("name", EVERY)
async def test_no_process_is_left(name: str) -> None:
    game = GAMES[name]
    info = game.source("x").env
    assert info is not None
    word = info.command[1] if info.command else str(Path(BRIDGES) / f"{info.library}_bridge.py")
    async with opened(game) as session:
        await session().reset()
        assert running(word)
    await eventually(lambda: not running(word))


@pytest.mark.envs
async def test_reasoning_gym_scores_its_own_answers_and_repeats_by_index() -> None:
    async with opened(LEGS) as session:
        first = session()
        question = (await first.reset()).text
        seen = await first.step("I do not know")
        assert seen.done and await first.score() != 1.0
        again = session()
        assert (await again.reset()).text == question
        await again.step(f"Let me count. <answer>{seen.info['answer']}</answer>")
        assert await again.score() == 1.0
        again.task.payload["index"] += 1
        assert (await again.reset()).text != question


@asynccontextmanager
async def node(folder: Path, **games: Game) -> AsyncGenerator[AttemptRunner]:
    """What attempts tasks on a node, with the environments of these sources."""
    snapshot = write_snapshot(folder / "snapshot")
    gateway = Gateway(await loaded_engine(snapshot))
    gateway.set_renderer(POLICY, Renderer.load(snapshot))
    endpoint = Endpoint(gateway)
    sources = tuple(game.source(name) for name, game in games.items())
    run_info = facts(
        reward="",
        sampling=SamplingSpec(max_tokens=3),
        sources=sources,
        start_to_close_s=600.0,
    )
    recorder = Recorder(NoTurns(), NodeId("n"))
    runner = AttemptRunner(gateway, endpoint, recorder, None, run_info, NodeId("n"))
    serving = asyncio.create_task(endpoint.run())
    try:
        yield runner
    finally:
        await runner.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def attempt(runner: AttemptRunner, game: Game, source: str) -> Trajectory:
    given = replace(game.task(source), workflow=game.source(source).workflow)
    return await runner.run(GRANT, given)


@pytest.mark.envs
async def test_verifiers_plays_by_itself_and_every_turn_is_recorded(tmp_path: Path) -> None:
    async with node(tmp_path, echo=ECHO) as runner:
        row = await attempt(runner, ECHO, "echo")
    assert row.outcome.has_reward, row.outcome.detail
    assert row.reward == 1.0 and len(row.turns) == 1


@pytest.mark.envs
async def test_two_bridges_with_contradicting_pins_in_one_run(tmp_path: Path) -> None:
    """verifiers needs mcp 2, the server of OpenEnv an older one."""
    versions = {name: _version("mcp", name) for name in ("verifiers", "openenv")}
    assert len({version.partition(".")[0] for version in versions.values()}) == 2
    async with node(tmp_path, echo=ECHO, guess=GUESS) as runner:
        rows = await asyncio.gather(attempt(runner, ECHO, "echo"), attempt(runner, GUESS, "guess"))
    assert [row.outcome.detail for row in rows] == ["", ""]
    assert rows[0].reward == 1.0 and rows[1].reward is not None


def _version(package: str, environment: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    argv = [str(environment_python(environment)), "-c", code]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()
