# SPDX-License-Identifier: Apache-2.0
"""Decides in which sandbox a node runs code that is not its own, and what that code may reach.

Commands, tools and graders fail closed: without isolation they do not start, unless `none` was
chosen. The owner's own reward falls back to limits and a clean environment, with a warning that
names the fix, so that a first run works. Starts no program itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import structlog

from penstock.errors import SandboxError
from penstock.rollout.proxied_sandbox import PROXY, PROXY_ENV, ProxiedSandbox
from penstock.rollout.sandbox.choose import choose
from penstock.rollout.sandbox.limits import LimitsBackend
from penstock.rollout.sandbox.types import (
    WORK_DIR,
    Backend,
    Grants,
    Level,
    Limits,
    Sandbox,
    SandboxSpec,
)
from penstock.rollout.sandbox_time import SandboxTime, time_of_attempt
from penstock.rollout.visible_folders import interpreter_folders, narrowed, unreachable, unreadable

FOREVER_S = 1e8
"""A wall clock for programs that have a deadline elsewhere."""
FIX = "apt install bubblewrap, and allow user namespaces; `penstock check` says what is missing"
_PASSED = ("LANG", "LANGUAGE", "TZ", "PYTHONHASHSEED", "PYTHONUNBUFFERED", "TOKENIZERS_PARALLELISM")
log = structlog.get_logger(__name__)


class Use(StrEnum):
    """What a sandbox is for."""

    REWARD = "reward"
    """The owner's reward functions."""
    WORKFLOW = "workflow"
    """Commands of workflows."""
    TOOLS = "tools"
    """Code that a model wrote, and graders."""
    SERVERS = "servers"
    """Programs that serve tools."""
    ENVIRONMENT = "environment"
    """Bridges of environments."""


_AS_LONG_AS_THE_NODE = (Use.REWARD, Use.ENVIRONMENT)
"""Their processes serve many attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UseSettings:
    """Limits and grants of one use."""

    limits: Limits = field(
        default_factory=lambda: Limits(
            wall_s=FOREVER_S,
            cpu_s=3600.0,
            memory_mb=4096,
            num_processes=256,
            disk_mb=1024,
            output_bytes=64 << 20,
        )
    )
    grants: Grants = field(default_factory=Grants)
    env: tuple[str, ...] = ()
    """Variables of this process that are passed on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolGrants:
    """What the node itself reaches for tools of its machine's own run file. Programs of tool
    servers do not."""

    folders: tuple[Path, ...] = ()
    """Of documents to search."""
    hosts: tuple[str, ...] = ()
    """Of servers with a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationSettings:
    backend: str = "auto"
    image: str = ""
    """Of the container back end."""
    demand: Level | None = None
    """The weakest level for any use; None: as the module says."""
    uses: Mapping[Use, UseSettings] = field(default_factory=dict[Use, UseSettings])
    hidden: tuple[Path, ...] = ()
    """Folders of runs, which no program may see."""
    tools: ToolGrants = field(default_factory=ToolGrants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Files of a sandbox that looks like another machine; see SandboxSpec."""

    root: Path | None
    writable: tuple[str, ...]


@dataclass(slots=True)
class Isolation:
    """Makes the sandboxes of one node. Tries the back end once, when it is first needed."""

    _settings: IsolationSettings = field(default_factory=IsolationSettings)
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _found: Backend | SandboxError | None = None
    _fallback: Backend | None = None

    async def backend(self, use: Use) -> Backend:
        """The back end for this use. Raises SandboxError if there is none that is strong enough."""
        async with self._lock:
            if self._found is None:
                self._found = await _find(self._settings)
            if not isinstance(self._found, SandboxError):
                return self._found
            may_fall = self._settings.backend == "auto" and (
                self._settings.demand is Level.LIMITS
                or (self._settings.demand is None and use is Use.REWARD)
            )
            if not may_fall:
                raise SandboxError(str(self._found))
            if self._fallback is None:
                self._fallback = LimitsBackend()
                what = "rewards run without isolation: they see the files and network of this host"
                log.warning(what, reason=str(self._found), fix=FIX)
            return self._fallback

    def settings_of(self, use: Use) -> UseSettings:
        """Its limits and grants on this machine."""
        return self._settings.uses.get(use, UseSettings())

    @property
    def tool_grants(self) -> ToolGrants:
        """What the node itself may reach for tools: also what is granted to their programs."""
        given, own = self.settings_of(Use.SERVERS).grants, self._settings.tools
        return ToolGrants(folders=(*own.folders, *given.folders), hosts=(*own.hosts, *given.hosts))

    async def open(
        self,
        use: Use,
        *,
        folders: Iterable[Path] = (),
        sockets: Mapping[str, Path] | None = None,
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
        row_id: str = "",
        places: Places | None = None,
    ) -> Sandbox:
        """A sandbox for this use, with its grants and these; not started yet. Requests to granted
        hosts are recorded with `row_id`."""
        backend = await self.backend(use)
        if places is not None and backend.name != "bubblewrap":
            raise SandboxError(
                f"the sandbox {backend.name} has no folders beside {WORK_DIR}, which this task "
                "needs; set `sandbox.backend: auto` in the run file"
            )
        settings = self.settings_of(use)
        given = settings.grants
        has_proxy = bool(given.hosts) and backend.level >= Level.NAMESPACES
        interpreter = interpreter_folders() if has_proxy else ()
        shown = (path for path in folders if not self._is_hidden(path))
        visible = narrowed((*shown, *given.folders, *interpreter))
        backend = self._reading_all(backend, use, visible)
        grants = replace(
            given,
            folders=visible,
            hidden=(*given.hidden, *self._settings.hidden),
            sockets={**given.sockets, **(sockets or {})},
        )
        bounds = limits or settings.limits
        if use in _AS_LONG_AS_THE_NODE:  # each of their calls has a deadline
            bounds = replace(bounds, wall_s=FOREVER_S, cpu_s=FOREVER_S, output_bytes=1 << 62)
        given_env = {**passed_env(settings.env), **(env or {})}
        spec = SandboxSpec(limits=bounds, grants=grants, env=given_env)
        if places is not None:
            spec = replace(spec, root=places.root, writable=places.writable)
        if not has_proxy:
            return backend.create(spec)
        return ProxiedSandbox(
            make=lambda path: backend.create(_with_proxy(spec, path)),
            hosts=given.hosts,
            row_id=row_id or use,
            is_of_one_attempt=use not in _AS_LONG_AS_THE_NODE,
        )

    def _is_hidden(self, path: Path) -> bool:
        """Also a file of a run that an argument of a command names; only the owner's own grant
        shows one."""
        real = path.resolve()
        return any(real.is_relative_to(folder.resolve()) for folder in self._settings.hidden)

    def _reading_all(self, backend: Backend, use: Use, folders: tuple[Path, ...]) -> Backend:
        """As root each sandbox has its own user, which cannot read a private folder."""
        private = unreadable(folders) if os.geteuid() == 0 else ()
        if os.geteuid() == 0 and backend.level is Level.LIMITS:
            private += unreachable(folders)
        if not private or backend.level is Level.NONE:
            return backend
        fix = f"chmod -R o+rX {' '.join(map(str, private))}"
        is_chosen = self._settings.demand is not None or self._settings.backend != "auto"
        if use is not Use.REWARD or is_chosen:
            names = ", ".join(map(str, private))
            raise SandboxError(
                f"a program in a sandbox has its own user, and only root can read {names}; "
                f"run `{fix}`, or start the run as another user"
            )
        log.warning("rewards run without isolation: only root can read their folder", fix=fix)
        return LimitsBackend(has_own_user=False)


def _with_proxy(spec: SandboxSpec, path: Path) -> SandboxSpec:
    grants = replace(spec.grants, sockets={**spec.grants.sockets, PROXY: path})
    return replace(spec, grants=grants, env={**PROXY_ENV, **spec.env})


async def _find(settings: IsolationSettings) -> Backend | SandboxError:
    """The back end, tested once in this process, or why there is none."""
    name, image = settings.backend, settings.image
    demand = settings.demand or (Level.NONE if name == "none" else Level.NAMESPACES)
    found = _tested.get((name, image))
    if found is not None and found.level >= demand:
        return found
    try:
        _tested[name, image] = found = await choose(name, demand=demand, image=image)
    except SandboxError as error:
        return error
    return found


_tested: dict[tuple[str, str], Backend] = {}
"""What holds on this machine, by name and image."""


def passed_env(names: Iterable[str] = ()) -> dict[str, str]:
    """The variables of this process that programs get: locale, time zone, thread counts, and those
    that the config names. Never a key of a cloud or hub."""
    return {
        name: value
        for name, value in os.environ.items()
        if name in _PASSED
        or name.startswith("LC_")
        or name.endswith("_NUM_THREADS")
        or name in names
    }


@dataclass(slots=True)
class Opened:
    """A started sandbox, killed at the end of `async with`. Its time counts for the attempt that
    opens it, unless others use it too."""

    box: Sandbox
    is_shared: bool = False
    _time: SandboxTime | None = None
    _key: int = 0

    async def __aenter__(self) -> Sandbox:
        if not self.is_shared and (time := time_of_attempt()) is not None:
            self._time, self._key = time, time.start()
        try:
            await self.box.start()
        except BaseException:
            await self.close()
            raise
        return self.box

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        try:
            await self.box.kill()
        finally:
            if self._time is not None:
                self._time.end(self._key)
                self._time = None
