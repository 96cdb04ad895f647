# SPDX-License-Identifier: Apache-2.0
"""Makes a few rollouts without training: no services, no run folder, nothing kept.

Owns the choice of tasks and of what answers: the policy's own engine, with the newest checkpoint of
a run folder or the initial weights, or an OpenAI-compatible server. Workflow and reward run as on a
node."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import httpx2

from penstock.config import RunConfig
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.build_sources import build_source
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.dataflow.sources import slot_seeds
from penstock.errors import ConfigError, PenstockError
from penstock.gateway.renderer import Renderer
from penstock.rollout.engine import Engine, EngineSettings
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.engines import find_engine
from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.scorer import SourceScorers
from penstock.runs.initial_versions import linked_versions
from penstock.runs.local_rollouts import Rollout, local_rollouts
from penstock.runs.logged_gateway import LoggedGateway, TextServer, TextSession, no_engine
from penstock.runs.sandbox_settings import isolation_settings
from penstock.runs.service_process import add_import_paths
from penstock.runs.target import RunTarget
from penstock.trainer.model_folders import initial_folder
from penstock.types import JsonObject, PolicyName, Task, Version

MAX_CONCURRENT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedRollout:
    source: str
    ordinal: int
    """Position of the task in its source."""
    task: JsonObject
    messages: tuple[JsonObject, ...]
    """The conversation in OpenAI's chat format."""
    reward: float | None
    """None if the rollout failed."""
    outcome: str
    """completed, truncated or failed."""
    reason: str
    detail: str
    """The cause of a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextServerAddress:
    base_url: str
    model: str
    api_key: str = ""


async def try_rollouts(
    target: RunTarget, count: int, server: TextServerAddress | None = None
) -> AsyncGenerator[TriedRollout]:
    """Make `count` rollouts of the first tasks of the sources in turn; yield each in that order.

    server: answers instead of the policy's own engine."""
    config = target.config
    add_import_paths(target.python_path)
    tasks = list(_tasks(config, count))
    info = run_info(config)
    async with AsyncExitStack() as resources:
        gateway = await _open_gateway(target, info, server, resources)
        rewards = {source.name: source.reward for source in info.sources}
        isolation = Isolation(isolation_settings(config, target.folder.path))
        scorer = SourceScorers(info.reward, rewards, isolation) if info.is_scored else None
        if scorer:
            scoring = asyncio.create_task(scorer.run(), name="score")
            resources.push_async_callback(_cancel, scoring)
        else:
            scoring = None
        rollout = await resources.enter_async_context(
            local_rollouts(info, gateway, scorer, isolation)
        )
        limit = asyncio.Semaphore(MAX_CONCURRENT)
        attempts = [
            asyncio.create_task(_attempt(rollout, gateway, task, number, limit))
            for task, number in tasks
        ]
        resources.push_async_callback(_cancel, *attempts)
        for attempt in attempts:
            watched = {attempt} if scoring is None else {attempt, scoring}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if scoring is not None and scoring.done():
                raise _root_cause(scoring)
            yield await attempt


async def _attempt(
    rollout: Rollout, gateway: LoggedGateway, task: Task, number: int, limit: asyncio.Semaphore
) -> TriedRollout:
    async with limit:
        trajectory = await rollout(task, number)
    [seed] = slot_seeds(task.seed, range(number, number + 1))
    return TriedRollout(
        source=task.source,
        ordinal=task.ordinal,
        task=task.payload,
        messages=tuple(gateway.sessions[seed].messages()),
        reward=trajectory.reward,
        outcome=trajectory.outcome.kind,
        reason=trajectory.outcome.reason,
        detail=trajectory.outcome.detail,
    )


def _tasks(config: RunConfig, count: int) -> Iterator[tuple[Task, int]]:
    """(task, number of the attempt at it): from the sources in turn, from the start again where one
    has too few."""
    sources = [build_source(config, source) for source in config.sources if source.session is None]
    if not sources:
        raise ConfigError(
            "sources: there are no tasks to try, only sessions of external agents; add a source "
            "with task: to try a workflow"
        )
    for index in range(count):
        source, turn = sources[index % len(sources)], index // len(sources)
        limit = source.limit
        ordinal, number = (turn, 0) if limit is None else (turn % limit, turn // limit)
        yield source.task(ordinal, seed=config.seed, workflow=""), number


async def _open_gateway(
    target: RunTarget, info: RunInfo, server: TextServerAddress | None, resources: AsyncExitStack
) -> LoggedGateway:
    if server is None:
        return await resources.enter_async_context(_engine_gateway(target, info))
    http = await resources.enter_async_context(httpx2.AsyncClient())
    text_server = TextServer(
        base_url=server.base_url, model=server.model, api_key=server.api_key, http=http
    )
    return LoggedGateway(no_engine, partial(TextSession, text_server))


@asynccontextmanager
async def _engine_gateway(target: RunTarget, info: RunInfo) -> AsyncGenerator[LoggedGateway]:
    """A gateway to the run's engine, which serves the weights of every policy."""
    with ExitStack() as folders:
        target = folders.enter_context(linked_versions(target))
        config = target.config
        scratch = Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="penstock-try-")))
        engines = EnginePools(info.policies, partial(_make_engine, config, info, scratch))
        gateway = LoggedGateway(engines)
        try:
            for name, model in config.models.items():
                folder = folders.enter_context(_weights(target, name, model.init))
                gateway.set_renderer(PolicyName(name), Renderer.load(folder))
                version = Version(policy=PolicyName(name), incarnation=1, number=0)
                await engines.load(folder, version)
            yield gateway
        finally:
            await engines.close()


@contextmanager
def _weights(target: RunTarget, policy: str, init: str) -> Generator[Path]:
    """A model folder: the newest checkpoint without the trainer's own files, else the initial
    model."""
    checkpoint = newest_checkpoint(target, policy)
    if checkpoint is None:
        with initial_folder(init, target.config.seed) as folder:
            yield folder
        return
    with tempfile.TemporaryDirectory(prefix="penstock-try-") as temporary:
        for path in checkpoint.iterdir():
            if not path.name.startswith(("optimizer", "trainer")):
                (Path(temporary) / path.name).symlink_to(path.absolute())
        yield Path(temporary)


def newest_checkpoint(target: RunTarget, policy: str) -> Path | None:
    """Of a run folder that was given as the target; None for a config file, or before the first
    checkpoint."""
    if target.config_file != target.folder.config_file:
        return None
    root = target.folder.path / "checkpoints"
    root = root / policy if len(target.config.models) > 1 else root
    found = {path: path.name.removeprefix("step_") for path in root.glob("step_*")}
    complete = [path for path, step in found.items() if step.isdecimal()]
    return max(complete, key=lambda path: int(found[path]), default=None)


def _make_engine(config: RunConfig, info: RunInfo, scratch: Path) -> Engine:
    first = next(iter(config.models.values()))
    settings = EngineSettings(
        seed=config.seed,
        torch_threads=info.torch_threads,
        is_deterministic=info.is_deterministic,
        url=first.engine_url,
        environment=first.vllm.environment or "",
        options=info.engine_options,
        state_dir=scratch,
    )
    return find_engine(info.engine).build(settings)


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _root_cause(task: asyncio.Task[None]) -> BaseException:
    error: BaseException | None = task.exception()
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error or PenstockError("scoring ended early")
