# SPDX-License-Identifier: Apache-2.0
"""A vLLM server with one base model and the adapters of one or more policies.

Each version is an adapter with a unique name, loaded in addition to the live ones, so nothing is
paused. New requests of a policy use its newest adapter. An answer keeps its adapter to the end, so
it has a single version; an older adapter is unloaded when its last answer has ended. vLLM keeps a
limited number of adapters in memory and evicts the least recently used; prefixes are cached per
adapter.

Owns adapter names, their reference counts and the check of the base. vLLM's weight label never
changes here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import structlog

from penstock.errors import EngineError
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.adapter_info import BaseDigests, check_same_layers
from penstock.rollout.engines.vllm.full_model import LoadedVersion
from penstock.rollout.engines.vllm.generate_api import CompletionParser, request_body
from penstock.rollout.engines.vllm.server import MAX_ADAPTERS, Server
from penstock.rollout.engines.vllm.supervisor import Supervisor
from penstock.types import PolicyName, Version

BASE = "base"
"""Weight label of the server; it never changes."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Adapter:
    name: str
    loaded: LoadedVersion


class AdapterSet:
    def __init__(self, server: Server, *, stall_s: float) -> None:
        self.supervisor = Supervisor(server, self, stall_s=stall_s)
        self.paused_s = 0.0
        """Always 0: loading an adapter pauses nothing."""
        self._is_lost = True
        self._base = ""
        self._files = BaseDigests()
        self._newest: dict[PolicyName, _Adapter] = {}
        self._names: set[str] = set()
        """Names of the adapters on the server."""
        self._uses: Counter[str] = Counter()
        self._num_loads = 0

    def live(self, policy: PolicyName) -> Version | None:
        newest = self._newest.get(policy)
        if newest is None or self._is_lost or not self.supervisor.is_running:
            return None
        return newest.loaded.version if newest.name in self._names else None

    async def answer(self, request: GenerationRequest, version: Version) -> Completion:
        adapter = self._newest[version.policy]
        name = adapter.name
        body = request_body(request, adapter.loaded.snapshot, version, model=name)
        parser = CompletionParser(lambda: version, request)
        self._uses[name] += 1
        try:
            await self.supervisor.generate(body, parser)
        finally:
            self._uses[name] -= 1
        return parser.completion({BASE: version})

    async def load(self, target: LoadedVersion) -> None:
        policy = target.version.policy
        before = self._newest.get(policy)
        if before is not None and self.live(policy) is not None and before.loaded == target:
            return  # already restored by the supervisor
        base = self._files.digest(target.folder)
        self._check(before, target, base)
        if self._is_lost:
            await self._start_serving(target)
            self._base = base
        await self._load_adapter(target)
        await self.unload_unused()

    def remove_policy(self, policy: PolicyName | None) -> None:
        """Forget a policy whose engine was closed; its adapter is unloaded after its last
        answer."""
        if policy is not None:
            self._newest.pop(policy, None)

    def on_server_lost(self) -> None:
        self._is_lost = True
        self._names.clear()

    async def restore(self) -> bool:
        first = next(iter(self._newest.values()), None)
        if first is None:
            return False
        await self._start_serving(first.loaded)
        return True

    async def unload_unused(self) -> None:
        """Unload unused adapters; failures are retried later."""
        needed = {adapter.name for adapter in self._newest.values()}
        for name in sorted(self._names - needed):
            if not self._uses[name]:
                try:
                    await self.supervisor.control.unload_adapter(name)
                except EngineError as error:
                    log.warning("adapter not unloaded", name=name, error=str(error))
                    continue
                self._names.discard(name)
                del self._uses[name]

    async def _load_adapter(self, target: LoadedVersion) -> None:
        if len(self._names) >= MAX_ADAPTERS:
            await self.unload_unused()
        if len(self._names) >= MAX_ADAPTERS:
            raise EngineError(
                f"no room for {target.version}: all {MAX_ADAPTERS} adapters on vLLM have running "
                "answers; the load is retried"
            )
        self._num_loads += 1  # names are never reused, so neither are prefixes cached under them
        name = f"{target.version}-{self._num_loads}"
        await self.supervisor.control.load_adapter(name, target.folder)
        self._names.add(name)
        self._newest[target.version.policy] = _Adapter(name, target)

    async def _start_serving(self, target: LoadedVersion) -> None:
        """Start the server with the base model, and reload the adapters that were live."""
        self._names.clear()
        if not await self.supervisor.start(target.folder):
            raise EngineError(
                "adapters require a vLLM server that the node starts with their base model; "
                "remove models.NAME.vllm.url, so that the node starts one"
            )
        control = self.supervisor.control
        await control.label(BASE)
        await control.check_logprobs()
        for adapter in list(self._newest.values()):
            await self._load_adapter(adapter.loaded)
        self._is_lost = False
        self.supervisor.mark_up()

    def _check(self, before: _Adapter | None, target: LoadedVersion, base: str) -> None:
        if before is not None or target.snapshot.adapter is None:
            info = None if before is None else before.loaded.snapshot.adapter
            check_same_layers(info, target.snapshot.adapter, target.folder)
        if self._base not in ("", base):
            raise EngineError(
                f"the adapter in {target.folder} has a different base model than vLLM; policies "
                "that share an engine must use the same `init`"
            )
