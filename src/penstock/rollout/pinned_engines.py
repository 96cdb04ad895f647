# SPDX-License-Identifier: Apache-2.0
"""Engines of the versions that an evaluation has pinned, beside the engines of the newest versions.

Owns when they exist: from the first load of an evaluation until it is over, and never while an
attempt of another evaluation runs, because an evaluation has one version. Fetches nothing: the
loader does.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.errors import EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.engine_pool import EnginePools
from penstock.rollout.rolling_swap import VerifyEngine
from penstock.types import PolicyName, PublishedVersion, Task, Trajectory, Version


class PinnedEngines:
    def __init__(
        self, make: Callable[[Sequence[PolicyName]], EnginePools], *, max_running: int
    ) -> None:
        """`make`: engines of these policies."""
        self.gateway = Gateway(self, max_running=max_running)
        """Where the attempts of evaluations call the model."""
        self.loaded: tuple[PublishedVersion, ...] = ()
        self.num_running = 0
        """Attempts that use the engines."""
        self._make = make
        self._pools: EnginePools | None = None

    async def __call__(self, request: GenerationRequest) -> Completion:
        if self._pools is None:
            raise EngineError("no evaluation is in progress on this node")
        return await self._pools(request)

    @contextmanager
    def in_use(self) -> Generator[None]:
        """An attempt runs: the versions stay."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1

    def live(self) -> tuple[LiveVersion, ...]:
        """Versions that answer, once all of the evaluation do."""
        live = () if self._pools is None else self._pools.live()
        return live if self.loaded and len(live) == len(self.loaded) else ()

    def needs_load(self, target: PublishedVersion, version: Version) -> bool:
        return target not in self.loaded or self._pools is None or self._pools.needs_load(version)

    async def load(
        self,
        folder: Path,
        version: Version,
        policies: Sequence[PolicyName],
        *,
        verify: VerifyEngine,
    ) -> None:
        """Load one of the pinned versions; `policies`: of all of them."""
        if self._pools is not None and self._pools.policies != frozenset(policies):
            await self.free()
        if self._pools is None:
            self._pools = self._make(policies)
        await self._pools.load(folder, version, verify=verify)

    async def free(self) -> None:
        """The evaluation is over: its engines end, and their memory is free."""
        pools, self._pools, self.loaded = self._pools, None, ()
        if pools is not None:
            await pools.close()


OnTrajectory = Callable[[Grant, Trajectory], None]


class Attempts(Protocol):
    async def run(self, grant: Grant, task: Task) -> Trajectory: ...

    def runs_together(self, grant: Grant, task: Task) -> bool:
        """Whether the slot may be attempted together with others of its group."""
        ...

    async def run_together(self, grants: Sequence[Grant], task: Task, done: OnTrajectory) -> None:
        """`run` for several slots of a group; `done` gets each trajectory as soon as it exists."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptsByKind:
    """Attempts at tasks by the newest versions, and at questions of evaluations by the pinned
    ones."""

    training: Attempts
    evaluation: Attempts
    pinned: PinnedEngines
    sources: frozenset[str]
    """Sources of evaluations."""

    async def run(self, grant: Grant, task: Task) -> Trajectory:
        if task.source not in self.sources:
            return await self.training.run(grant, task)
        with self.pinned.in_use():
            return await self.evaluation.run(grant, task)

    def runs_together(self, grant: Grant, task: Task) -> bool:
        return task.source not in self.sources and self.training.runs_together(grant, task)

    async def run_together(self, grants: Sequence[Grant], task: Task, done: OnTrajectory) -> None:
        await self.training.run_together(grants, task, done)
