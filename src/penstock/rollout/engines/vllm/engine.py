# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as an engine: token ids in and out, weights swapped during running answers.

Uses `POST /inference/v1/generate`. Its last event, or its full response, has vLLM's version spans,
counted where tokens are sampled. With a chunk callback the answer is streamed. The first folder
decides the mode: a full model that is swapped (`full_model`), or a base model with the adapters of
one or more policies (`adapters`), whose engines `share` the server.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import EngineError
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.engine import CLOSED, live_for
from penstock.rollout.engines.vllm.adapters import AdapterSet
from penstock.rollout.engines.vllm.full_model import FullModel, LoadedVersion
from penstock.rollout.engines.vllm.server import Server
from penstock.rollout.snapshot import read_snapshot
from penstock.types import PolicyName, Version

STALL_S = 120.0
"""Without a token for this long, a server counts as dead; a long prefill on a slow machine takes
a while."""


@dataclass(slots=True)
class _SharedServer:
    """The server of one or more engines."""

    server: Server
    stall_s: float
    keeps_kv: bool = False
    records_experts: bool = False
    num_open: int = 0
    serving: FullModel | AdapterSet | None = None

    def serve(self, first: LoadedVersion) -> FullModel | AdapterSet:
        if first.snapshot.adapter is None and self.num_open > 1:
            raise EngineError(
                f"{first.folder} has no adapter, but {self.num_open} policies share this vLLM; "
                "a policy that trains all weights needs a separate engine"
            )
        if self.serving is None:
            self.serving = self._make(first)
        return self.serving

    def _make(self, first: LoadedVersion) -> FullModel | AdapterSet:
        if first.snapshot.adapter is not None:
            if self.records_experts:
                raise EngineError(
                    "expert choices are recorded for full models only; remove lora, or set "
                    "training.router_replay: false"
                )
            return AdapterSet(self.server, stall_s=self.stall_s)
        if self.records_experts and not first.snapshot.num_experts:
            raise EngineError(
                f"{first.folder} is not a mixture of experts; set training.router_replay: false"
            )
        return FullModel(
            self.server,
            stall_s=self.stall_s,
            keeps_kv=self.keeps_kv,
            records_experts=self.records_experts,
        )


class VllmEngine:
    def __init__(
        self,
        server: Server,
        *,
        stall_s: float = STALL_S,
        keeps_kv: bool = False,
        shared: _SharedServer | None = None,
        records_experts: bool = False,
    ) -> None:
        """`keeps_kv`: swaps of a full model keep the keys and values of running answers. `shared`:
        the server of another engine, to share it. `records_experts`: answers carry the experts that
        a mixture chose."""
        self._shared = shared or _SharedServer(server, stall_s, keeps_kv, records_experts)
        self._shared.num_open += 1
        self._policy: PolicyName | None = None
        self._is_closed = False

    def share(self) -> VllmEngine:
        """An engine for another policy's adapters on the same server."""
        return VllmEngine(self._shared.server, shared=self._shared)

    @property
    def live(self) -> Version | None:
        if self._is_closed or self._policy is None or self._shared.serving is None:
            return None
        return self._shared.serving.live(self._policy)

    @property
    def url(self) -> str | None:
        """Address of its server."""
        serving = self._shared.serving
        return None if serving is None else serving.supervisor.url

    @property
    def loaded(self) -> Path | None:
        """The folder of its weights, from which a patch may lead to the next version."""
        return None if self.full_model is None else self.full_model.loaded

    @property
    def full_model(self) -> FullModel | None:
        """None before the first load, and if it serves adapters."""
        serving = self._shared.serving
        return serving if isinstance(serving, FullModel) and not self._is_closed else None

    @property
    def paused_s(self) -> float:
        """How long the last swap paused decoding."""
        return 0.0 if self._shared.serving is None else self._shared.serving.paused_s

    async def __call__(self, request: GenerationRequest) -> Completion:
        version = live_for(request.policy, self.live, is_closed=self._is_closed)
        assert self._shared.serving is not None
        return await self._shared.serving.answer(request, version)

    async def load(self, folder: Path, version: Version) -> None:
        if self._is_closed:
            raise EngineError(CLOSED)
        target = LoadedVersion(folder, version, await asyncio.to_thread(read_snapshot, folder))
        serving = self._shared.serve(target)
        async with serving.supervisor.lock:
            if self._is_closed:
                raise EngineError(CLOSED)
            await serving.load(target)
        self._policy = version.policy

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._shared.num_open -= 1
        serving = self._shared.serving
        if serving is None:
            await self._shared.server.stop()
        elif self._shared.num_open:
            serving.remove_policy(self._policy)
        else:
            await serving.supervisor.close()
