# SPDX-License-Identifier: Apache-2.0
"""The engines of this node, one per policy, as the gateway sees them: a single `Generate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.dataflow.protocol import LiveVersion
from penstock.errors import EngineError, boundary
from penstock.gateway.generate import Completion
from penstock.rollout.engines.base import Engine
from penstock.types import PolicyName, SamplingSpec, Version


class Engines:
    """Nothing is live until the first `load()`, which also waits for an engine's slow imports."""

    def __init__(self, policies: Sequence[PolicyName], make: Callable[[], Engine]) -> None:
        self._by_policy = {policy: make() for policy in policies}

    @property
    def policies(self) -> frozenset[PolicyName]:
        return frozenset(self._by_policy)

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        *,
        policy: PolicyName,
        session: str,
    ) -> Completion:
        engine = self._by_policy[policy]
        with boundary(EngineError, f"engine of policy {policy}, generate"):
            return await engine(prompt_ids, sampling, policy=policy, session=session)

    async def load(self, folder: Path, version: Version) -> None:
        with boundary(EngineError, f"engine of policy {version.policy}, load of {version}"):
            await self._by_policy[version.policy].load(folder, version)

    def live(self) -> tuple[LiveVersion, ...]:
        served = (engine.live for engine in self._by_policy.values())
        return tuple(
            LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number)
            for v in served
            if v is not None
        )

    async def close(self) -> None:
        for engine in self._by_policy.values():
            await engine.close()
