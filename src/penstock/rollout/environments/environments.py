# SPDX-License-Identifier: Apache-2.0
"""The environments of one node: for each source that has one, its bridge and its places.

Owns when a bridge starts: with the first episode, and again after it ended. Attempts that wait for
the same start share its failure, so a broken environment costs one deadline and not one for each.
Bridges run in sandboxes without network, with the variables and folders that `sandbox.environment`
grants; they end with the node."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, cast

from penstock.dataflow.service.nodes.messages import EnvironmentInfo, SourceInfo
from penstock.errors import EnvironmentFailed, WorkflowError
from penstock.plugins import load_function
from penstock.rollout.agent_programs import GATEWAY, PORT
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.environments.bridge_process import Bridge, BridgeSettings, start_bridge
from penstock.rollout.environments.session import EnvironmentSession, Hooks
from penstock.rollout.environments.types import AfterStep, BeforeStep
from penstock.rollout.isolation import Isolation, Use
from penstock.rollout.proxied_sandbox import with_ports
from penstock.rollout.sandbox.types import Level
from penstock.rollout.visible_folders import interpreter_folders, program_folders
from penstock.types import Task


def environment_python(library: str) -> Path:
    """The interpreter of the virtual environment that `make setup-envs` makes for a library."""
    cache = Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser()
    return cache / "envs" / library / "bin" / "python"


def bridge_command(info: EnvironmentInfo) -> tuple[str, ...]:
    """The program that runs this environment."""
    if not info.library:
        return info.command
    scripts = resources.files("penstock.rollout.environments").joinpath("bridges")
    python = Path(info.python).expanduser() if info.python else environment_python(info.library)
    return (str(python.absolute()), str(scripts.joinpath(f"{info.library}_bridge.py")))


@dataclass(slots=True)
class _SourceEnvironment:
    """The environment of one source."""

    settings: BridgeSettings
    hooks: Hooks
    _calls_model: bool
    _isolation: Isolation
    _endpoint: Endpoint
    _places: asyncio.Semaphore
    _bridges: set[Bridge] = field(default_factory=set[Bridge])
    _starting: asyncio.Task[None] | None = None
    _current: Bridge | None = None
    _ending: set[asyncio.Task[None]] = field(default_factory=set["asyncio.Task[None]"])

    def session(self, task: Task, name: str, api_key: str, policy: str) -> EnvironmentSession:
        return EnvironmentSession(
            task=task,
            open_bridge=self._open_bridge,
            release=self._release,
            name=name,
            api_key=api_key,
            policy=policy,
            hooks=self.hooks,
        )

    async def _open_bridge(self) -> Bridge:
        """The current bridge, with a place in it taken."""
        await self._places.acquire()
        try:
            while self._current is None or not self._current.is_open:
                if self._starting is None:
                    self._starting = asyncio.create_task(self._start())
                    self._starting.add_done_callback(_retrieve)
                # Others wait for it too, so a cancelled attempt does not end it.
                await asyncio.shield(self._starting)
            return self._current
        except BaseException:
            self._places.release()
            raise

    async def _start(self) -> None:
        try:
            for ended in [one for one in self._bridges if not one.is_open and not one.episodes]:
                self._bridges.discard(ended)
                await ended.kill()
            self._current = await self._start_bridge()
            self._bridges.add(self._current)
        except OSError as error:
            raise EnvironmentFailed(
                f"{self.settings.label}: cannot start {self.settings.argv[0]}: {error}; "
                "`penstock check` says what is missing"
            ) from error
        finally:
            self._starting = None

    async def _start_bridge(self) -> Bridge:
        argv = self.settings.argv
        sockets, ports, model_url = await self._way_to_the_model()
        box = await self._isolation.open(
            Use.ENVIRONMENT,
            folders=(*program_folders(argv), *interpreter_folders(), self._modules),
            sockets=sockets,
            env={"PATH": os.environ.get("PATH", os.defpath)},
            row_id=self.settings.source,
        )
        command = with_ports(ports, argv, folder=os.getcwd())
        return await start_bridge(self.settings, box, command, model_url=model_url)

    @property
    def _modules(self) -> Path:
        """The folder of the user's modules."""
        return Path(self.settings.settings.get("path", ".")).expanduser()

    async def _way_to_the_model(self) -> tuple[dict[str, Path], dict[int, str], str]:
        """Sockets to grant, ports that lead to them inside, and the URL there."""
        if not self._calls_model:
            return {}, {}, ""
        if (await self._isolation.backend(Use.ENVIRONMENT)).level < Level.NAMESPACES:
            return {}, {}, self._endpoint.url
        sockets = {GATEWAY: self._endpoint.socket_path}
        return sockets, {PORT: f"/run/sockets/{GATEWAY}"}, f"http://127.0.0.1:{PORT}/v1"

    def _release(self, bridge: Bridge, episode: str) -> None:
        self._places.release()
        ending: Coroutine[Any, Any, None] = bridge.end_episode(episode)
        task = asyncio.create_task(ending)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await asyncio.gather(*(bridge.kill() for bridge in self._bridges))


def _retrieve(start: asyncio.Task[None]) -> None:
    """A failed start whose attempts were all cancelled is nothing to warn of."""
    if not start.cancelled():
        start.exception()


class Environments:
    """Makes the session of an attempt. Hooks load at once: a wrong name ends the node."""

    def __init__(
        self, sources: Iterable[SourceInfo], isolation: Isolation, endpoint: Endpoint
    ) -> None:
        self._by_source = {
            source.name: _environment(source.name, source.env, isolation, endpoint)
            for source in sources
            if source.env is not None
        }

    def session(
        self, task: Task, *, name: str, api_key: str, policy: str
    ) -> EnvironmentSession | None:
        """The environment of this attempt, not yet started; None if its source has none."""
        found = self._by_source.get(task.source)
        return None if found is None else found.session(task, name, api_key, policy)

    async def close(self) -> None:
        """End every bridge."""
        await asyncio.gather(*(found.close() for found in self._by_source.values()))


def no_environment() -> WorkflowError:
    return WorkflowError(
        "the workflow uses ctx.env, and the source of this task has no environment; add env: to "
        "the source in the run file"
    )


def _environment(
    source: str, info: EnvironmentInfo, isolation: Isolation, endpoint: Endpoint
) -> _SourceEnvironment:
    settings = BridgeSettings(
        source=source,
        library=info.library,
        argv=bridge_command(info),
        settings=info.settings,
        max_episodes=info.max_episodes,
        start_timeout_s=info.start_timeout_s,
        reset_timeout_s=info.reset_timeout_s,
        step_timeout_s=info.step_timeout_s,
        lease_s=info.lease_s,
    )
    hooks = Hooks(
        before_step=cast(BeforeStep, load_function(info.before_step)) if info.before_step else None,
        after_step=cast(AfterStep, load_function(info.after_step)) if info.after_step else None,
    )
    places = asyncio.Semaphore(info.max_episodes)
    return _SourceEnvironment(settings, hooks, info.calls_model, isolation, endpoint, places)
