# SPDX-License-Identifier: Apache-2.0
"""The node's engines, one pool per policy, behind a single `Generate` for the gateway.

Policies that are adapters of one model share engines: each policy's pool holds views of the same
processes, with separate live versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.dataflow.core.leasing import LiveVersion
from penstock.errors import EngineError, wrap_errors
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.engine import Engine, Shareable
from penstock.rollout.engine_pool import MAX_PAUSED, EnginePool, PoolStats, VerifyEngine
from penstock.types import PolicyName, Version


class EnginePools:
    """No version is live until the first `load()`, which also waits for an engine's imports."""

    def __init__(
        self,
        policies: Sequence[PolicyName],
        make: Callable[[], Engine],
        *,
        num_engines: int = 1,
        max_paused: float = MAX_PAUSED,
        sharing: Sequence[Sequence[PolicyName]] = (),
    ) -> None:
        """`sharing`: sets of policies with a common base. Other policies get separate engines."""
        unshared = set(policies).difference(*sharing)
        self._by_policy: dict[PolicyName, EnginePool] = {}
        for shared in (*sharing, *((policy,) for policy in policies if policy in unshared)):
            views = [_engine_views(make, len(shared)) for _ in range(num_engines)]
            for policy, engines in zip(shared, zip(*views, strict=True), strict=True):
                self._by_policy[policy] = EnginePool(engines, max_paused=max_paused)

    @property
    def policies(self) -> frozenset[PolicyName]:
        return frozenset(self._by_policy)

    async def __call__(self, request: GenerationRequest) -> Completion:
        with wrap_errors(EngineError, f"engine of policy {request.policy}, generate"):
            return await self._by_policy[request.policy](request)

    async def load(
        self, folder: Path, version: Version, *, verify: VerifyEngine | None = None
    ) -> None:
        """See `EnginePool.load`."""
        with wrap_errors(EngineError, f"engine of policy {version.policy}, load of {version}"):
            await self._by_policy[version.policy].load(folder, version, verify=verify)

    def needs_load(self, version: Version) -> bool:
        return self._by_policy[version.policy].needs_load(version)

    def live(self) -> tuple[LiveVersion, ...]:
        """The oldest version that is served, for each policy."""
        served = (pool.live for pool in self._by_policy.values())
        return tuple(
            LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number)
            for v in served
            if v is not None
        )

    def stats(self) -> dict[PolicyName, PoolStats]:
        return {policy: pool.stats for policy, pool in self._by_policy.items()}

    async def close(self) -> None:
        for pool in self._by_policy.values():
            await pool.close()


def _engine_views(make: Callable[[], Engine], num_policies: int) -> list[Engine]:
    """One engine as seen by each of its policies; engines that cannot share are built separately.

    Only engines that hold weights are `Shareable`."""
    first = make()
    others = range(num_policies - 1)
    if isinstance(first, Shareable):
        return [first, *(first.share() for _ in others)]
    return [first, *(make() for _ in others)]
