# SPDX-License-Identifier: Apache-2.0
"""Environments of attempts: what a workflow gets, and what becomes of an environment that fails.

The faulty bridge is a real process; most tests leave out the sandbox, which has its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from tests.unit.rollout.fake_dataflow import POLICY, facts, task
from tests.unit.rollout.polling import eventually, running
from tests.unit.rollout.test_attempt import GRANT, DirectScorer, NoTurns, loaded_engine

from penstock.dataflow.service.nodes.messages import EnvironmentInfo, SourceInfo
from penstock.errors import EnvironmentFailed
from penstock.gateway.gateway import Gateway
from penstock.gateway.renderer import Renderer
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.environments.environments import Environments
from penstock.rollout.environments.session import EnvironmentSession
from penstock.rollout.isolation import Isolation, IsolationSettings
from penstock.rollout.recorder import Recorder
from penstock.types import FailureKind, NodeId, OutcomeKind, SamplingSpec, Trajectory

FAKE = str(Path(__file__).parent / "fake_bridge.py")
FLOWS = "tests.unit.rollout.environments.env_workflows"
OPEN = IsolationSettings(backend="none")


def info(*arguments: str, **changes: object) -> EnvironmentInfo:
    command = (sys.executable, FAKE, *arguments)
    values: dict[str, object] = {"library": "", "settings": {}, "command": command}
    return EnvironmentInfo(**{**values, **changes})  # type: ignore[arg-type]


@asynccontextmanager
async def runner(
    snapshot: Path,
    env: EnvironmentInfo | None,
    workflow: str = "count_down",
    isolation: IsolationSettings = OPEN,
) -> AsyncGenerator[AttemptRunner]:
    sampling = SamplingSpec(max_tokens=3)
    own = SourceInfo(name="train", workflow=f"{FLOWS}:{workflow}", reward="", sampling=sampling)
    run_info = facts(
        workflow=f"{FLOWS}:{workflow}",
        reward="",
        sampling=sampling,
        sources=(replace(own, env=env),),
    )
    gateway = Gateway(await loaded_engine(snapshot))
    gateway.set_renderer(POLICY, Renderer.load(snapshot))
    recorder = Recorder(NoTurns(), NodeId("n"))
    attempts = AttemptRunner(
        gateway,
        Endpoint(gateway),
        recorder,
        DirectScorer(),
        run_info,
        NodeId("n"),
        Isolation(isolation),
    )
    try:
        yield attempts
    finally:
        await attempts.close()


async def attempt(attempts: AttemptRunner, epoch: int = 1) -> Trajectory:
    grant = msgspec.structs.replace(GRANT, epoch=epoch, attempt=epoch)
    return await attempts.run(grant, task())


def failure(row: Trajectory) -> str:
    """The detail of a row that failed by its environment, and never as a reward."""
    assert (row.outcome.kind, row.outcome.reason) == (OutcomeKind.FAILED, FailureKind.ENVIRONMENT)
    assert row.reward is None
    return row.outcome.detail


async def test_a_workflow_plays_an_episode_and_returns_its_score(snapshot: Path) -> None:
    async with runner(snapshot, info()) as attempts:
        row = await attempt(attempts)
    assert row.reward == 1.0 and row.outcome.has_reward


SIX_FAULTS = {
    "hang": "step: gave no answer within 0.3 s",
    "slow": "step: gave no answer within 0.3 s",
    "crash": "its process ended (exit code 3) (last output: the world ended)",
    "garbage": "broke the protocol: '<html>oops</html>' is not a valid answer",
    "wrong-version": "it speaks protocol 99 and this node 1",
    "half-open": "hello: gave no answer within",
}
MORE_FAULTS = {
    "nan": "broke the protocol",
    "stranger": "which was never made",
    "flood": "a line of more than 16 MiB",
    "empty": "answered without an observation",
    "raise": "raised: ValueError: the world is broken",
    "deaf": "closed its standard output",
}


@pytest.mark.parametrize("fault", [*SIX_FAULTS, *MORE_FAULTS])
async def test_a_fault_is_a_typed_failure_and_the_retry_succeeds(
    snapshot: Path, tmp_path: Path, fault: str
) -> None:
    # Only the call that never gets an answer has a short deadline, so no machine is too slow.
    short = "start_timeout_s" if fault == "half-open" else "step_timeout_s"
    is_waiting = fault in ("half-open", "hang", "slow")
    limits = {short: 0.3} if is_waiting else {}
    mark = str(tmp_path / "happened")
    async with runner(snapshot, info(fault, mark, **limits)) as attempts:
        detail = failure(await attempt(attempts))
        assert (SIX_FAULTS | MORE_FAULTS)[fault] in detail
        assert "environment of source train" in detail
    again = () if fault == "half-open" else (fault, mark)  # it may end before it counts its start
    async with runner(snapshot, info(*again)) as attempts:
        assert (await attempt(attempts, 2)).reward == 1.0


@pytest.mark.parametrize("fault", SIX_FAULTS)
async def test_a_node_goes_on_with_a_new_bridge_after_a_fault(
    snapshot: Path, tmp_path: Path, fault: str
) -> None:
    """All attempts at once: none stalls, each failure is typed, and what comes later succeeds."""
    limits: dict[str, object] = {"start_timeout_s": 2.0 if fault == "half-open" else 120.0}
    limits["step_timeout_s"] = 2.0 if fault in ("hang", "slow") else 60.0
    async with runner(snapshot, info(fault, str(tmp_path / "happened"), **limits)) as attempts:
        rows = await asyncio.gather(*(attempt(attempts, epoch) for epoch in range(1, 5)))
        assert any(row.outcome.kind is OutcomeKind.FAILED for row in rows)
        # A bridge that ends before it counts its start has the fault again.
        while any(row.reward is None for row in rows):
            assert all(failure(row) for row in rows if row.reward is None)
            rows = [await attempt(attempts, 9)]
        assert rows[0].reward == 1.0


async def test_a_failed_environment_fails_the_attempt_whatever_the_workflow_returns(
    snapshot: Path,
) -> None:
    async with runner(snapshot, info("crash"), "carry_on") as attempts:
        assert "its process ended" in failure(await attempt(attempts))


async def test_a_missing_program_is_a_typed_failure(snapshot: Path) -> None:
    env = info(command=("/nowhere/python", "x.py"))
    async with runner(snapshot, env) as attempts:
        assert "/nowhere/python" in failure(await attempt(attempts))


async def test_hooks_see_actions_and_observations(snapshot: Path) -> None:
    env = info(before_step=f"{FLOWS}:always_down", after_step=f"{FLOWS}:shout")
    async with runner(snapshot, env) as attempts:
        session = attempts._environments.session(task(), name="e", api_key="", policy="")  # pyright: ignore[reportPrivateUsage]
        assert session is not None
        await session.reset()
        assert (await session.step("up")).text == "1 LEFT"
        session.close()


async def test_a_hook_that_raises_is_the_fault_of_the_workflow(snapshot: Path) -> None:
    async with runner(snapshot, info(after_step=f"{FLOWS}:broken")) as attempts:
        row = await attempt(attempts)
    assert row.outcome.reason == FailureKind.WORKFLOW and "hook of the user" in row.outcome.detail


async def test_a_source_without_an_environment_says_what_to_add(snapshot: Path) -> None:
    async with runner(snapshot, None) as attempts:
        row = await attempt(attempts)
    assert row.outcome.reason == FailureKind.WORKFLOW and "add env:" in row.outcome.detail


async def test_a_step_before_a_reset_is_the_fault_of_the_workflow(snapshot: Path) -> None:
    async with runner(snapshot, info(), "step_first") as attempts:
        row = await attempt(attempts)
    assert row.outcome.reason == FailureKind.WORKFLOW and "reset it first" in row.outcome.detail


async def test_in_the_sandbox_it_works_and_ends_with_the_node(snapshot: Path) -> None:
    async with runner(snapshot, info(), isolation=IsolationSettings()) as attempts:
        assert (await attempt(attempts)).reward == 1.0


def sessions(env: EnvironmentInfo, isolation: IsolationSettings = OPEN) -> Environments:
    sampling = SamplingSpec()
    source = SourceInfo(name="train", workflow="", reward="", sampling=sampling, env=env)
    gateway = Gateway(lambda request: None)  # type: ignore[arg-type, return-value]
    return Environments([source], Isolation(isolation), Endpoint(gateway))


def session(environments: Environments, name: str) -> EnvironmentSession:
    found = environments.session(task(), name=name, api_key="", policy="")
    assert found is not None
    return found


async def test_no_more_episodes_than_places(snapshot: Path) -> None:
    environments = sessions(info(max_episodes=1))
    first, second = session(environments, "a"), session(environments, "b")
    await first.reset()
    waiting = asyncio.create_task(second.reset())
    assert not (await asyncio.wait([waiting], timeout=0.05))[0]
    first.close()
    assert (await waiting).text == "2 left"
    second.close()
    await environments.close()


async def test_attempts_that_wait_for_one_start_share_its_failure() -> None:
    environments = sessions(info("half-open", start_timeout_s=0.2))
    rows = [session(environments, str(n)).reset() for n in range(8)]
    found = await asyncio.gather(*rows, return_exceptions=True)
    assert all(isinstance(one, EnvironmentFailed) for one in found)
    assert len({id(one) for one in found}) == 1
    await environments.close()


async def test_a_cancelled_attempt_leaves_the_bridge_to_the_next() -> None:
    environments = sessions(info())
    waiting = asyncio.create_task(session(environments, "a").reset())
    await eventually(lambda: running(FAKE))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    later = session(environments, "b")
    assert (await later.reset()).text == "2 left"
    assert len(running(FAKE)) == 1
    await environments.close()
    assert not running(FAKE)
