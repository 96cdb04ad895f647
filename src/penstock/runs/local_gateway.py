# SPDX-License-Identifier: Apache-2.0
"""What answers the rollouts of this process, and what scores them, for `penstock try`, `eval` and
`solve`: the engines of a run with weights of its folder, or an OpenAI-compatible server.

Owns the wiring and its end. Makes no rollout by itself, and leases and keeps nothing."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx2

from penstock.api_keys import key_headers, may_use_proxy
from penstock.config import RunConfig
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.errors import PenstockError
from penstock.gateway.renderer import Renderer
from penstock.rollout.engine import Engine, EngineSettings
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.engines import find_engine
from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.scorer import SourceScorers
from penstock.runs.chosen_weights import ChosenWeights, newest_checkpoint_or_init
from penstock.runs.initial_versions import linked_versions
from penstock.runs.local_rollouts import Rollout, local_rollouts
from penstock.runs.logged_gateway import (
    LoggedGateway,
    LoggedSession,
    TextServer,
    TextSession,
    no_engine,
)
from penstock.runs.sandbox_settings import isolation_settings
from penstock.runs.target import RunTarget
from penstock.types import PolicyName, Version


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionKinds:
    """What makes the sessions of a gateway."""

    engine: Callable[..., LoggedSession] = LoggedSession
    server: Callable[..., LoggedSession] = TextSession
    """Gets the server of text first."""


LOGGED = SessionKinds()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextServerAddress:
    base_url: str
    model: str
    api_key: str = ""


@asynccontextmanager
async def open_gateway(
    target: RunTarget,
    info: RunInfo,
    server: TextServerAddress | None,
    *,
    weights: Mapping[str, ChosenWeights] | None = None,
    sessions: SessionKinds = LOGGED,
) -> AsyncGenerator[LoggedGateway]:
    """A gateway to the engines of the run, or to the server.

    weights: by policy; a policy that is not listed has its newest checkpoint."""
    if server is None:
        async with _engine_gateway(target, info, weights or {}, sessions.engine) as gateway:
            yield gateway
        return
    key_headers(server.base_url, server.api_key, "OPENAI_API_KEY")  # refused before any work
    async with httpx2.AsyncClient(trust_env=may_use_proxy(server.base_url)) as http:
        text_server = TextServer(
            base_url=server.base_url, model=server.model, api_key=server.api_key, http=http
        )
        yield LoggedGateway(no_engine, partial(sessions.server, text_server))


@asynccontextmanager
async def _engine_gateway(
    target: RunTarget,
    info: RunInfo,
    weights: Mapping[str, ChosenWeights],
    sessions: Callable[..., LoggedSession],
) -> AsyncGenerator[LoggedGateway]:
    """A gateway to the run's engine, which serves the weights of every policy."""
    with ExitStack() as folders:
        target = folders.enter_context(linked_versions(target))
        config = target.config
        scratch = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="penstock-try-")))
        engines = EnginePools(info.policies, partial(_make_engine, config, info, scratch))
        gateway = LoggedGateway(engines, sessions)
        try:
            for name in config.models:
                chosen = weights.get(name) or newest_checkpoint_or_init(target, name)
                folder = folders.enter_context(chosen.open())
                gateway.set_renderer(PolicyName(name), Renderer.load(folder))
                version = Version(policy=PolicyName(name), incarnation=1, number=chosen.number)
                await engines.load(folder, version)
            yield gateway
        finally:
            await engines.close()


def _make_engine(config: RunConfig, info: RunInfo, scratch: Path) -> Engine:
    first = next(iter(config.models.values()))
    settings = EngineSettings(
        seed=config.seed,
        torch_threads=info.torch_threads,
        is_deterministic=info.is_deterministic,
        url=next(iter(first.engine_urls), ""),
        environment=first.vllm.environment or "",
        options=info.engine_options,
        state_dir=scratch,
    )
    return find_engine(info.engine).build(settings)


@asynccontextmanager
async def open_rollouts(
    target: RunTarget, info: RunInfo, gateway: LoggedGateway
) -> AsyncGenerator[tuple[Rollout, asyncio.Task[None] | None]]:
    """A function that makes scored rollouts, and the work of the reward processes, for
    `wait_or_raise`: it ends if the reward cannot be imported."""
    rewards = {source.name: source.reward for source in info.sources}
    isolation = Isolation(isolation_settings(target.config, target.folder.path))
    scorer = SourceScorers(info.reward, rewards, isolation) if info.is_scored else None
    async with AsyncExitStack() as resources:
        scoring = None
        if scorer is not None:
            scoring = asyncio.create_task(scorer.run(), name="score")
            resources.push_async_callback(cancel, scoring)
        opened = local_rollouts(info, gateway, scorer, isolation)
        yield await resources.enter_async_context(opened), scoring


async def wait_or_raise(attempt: asyncio.Task[Any], scoring: asyncio.Task[None] | None) -> None:
    """Until the attempt has ended; raises what ended the scoring before it."""
    watched: set[asyncio.Task[Any]] = {attempt} if scoring is None else {attempt, scoring}
    await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
    if scoring is not None and scoring.done():
        raise _root_cause(scoring)


async def cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _root_cause(task: asyncio.Task[None]) -> BaseException:
    error: BaseException | None = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error or PenstockError("scoring ended early")
