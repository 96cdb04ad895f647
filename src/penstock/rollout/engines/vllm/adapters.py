# SPDX-License-Identifier: Apache-2.0
"""A vLLM server that holds one base and adapters of one or more policies on it.

Each version is an adapter under a name of its own, loaded beside those that serve: nothing is
paused, and no other answer is touched. New requests of its policy name the newest; an answer keeps
its adapter to its end, so all of it is of one version, and an adapter that is not the newest is
unloaded when its last answer has ended. vLLM keeps so many adapters in memory and forgets the one
used least recently; prefixes are cached by adapter.

Owns names, uses and the check of bases. vLLM's own label of weights never changes here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from penstock.errors import EngineError
from penstock.gateway.generation import ChunkCallback, Completion
from penstock.rollout.adapter_info import BaseDigests, check_same_layers
from penstock.rollout.engines.vllm.full_model import LoadedVersion, cache_salt
from penstock.rollout.engines.vllm.generate_api import CompletionParser, request_body
from penstock.rollout.engines.vllm.server import MAX_ADAPTERS, Server
from penstock.rollout.engines.vllm.supervisor import Supervisor
from penstock.rollout.snapshot import Snapshot
from penstock.types import PolicyName, SamplingSpec, Version

BASE = "base"
"""Label of the only weights that such a server has."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Adapter:
    name: str
    loaded: LoadedVersion


class AdapterSet:
    def __init__(self, server: Server, *, stall_s: float) -> None:
        self.supervisor = Supervisor(server, self, stall_s=stall_s)
        self.paused_s = 0.0
        """Nobody waits for an adapter."""
        self._is_lost = True
        self._base = ""
        self._files = BaseDigests()
        self._newest: dict[PolicyName, _Adapter] = {}
        self._names: set[str] = set()
        """On the server."""
        self._uses: Counter[str] = Counter()
        self._num_loads = 0

    def live(self, policy: PolicyName) -> Version | None:
        newest = self._newest.get(policy)
        if newest is None or self._is_lost or not self.supervisor.is_running:
            return None
        return newest.loaded.version if newest.name in self._names else None

    def snapshot(self, version: Version) -> Snapshot:
        return self._newest[version.policy].loaded.snapshot

    async def answer(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        version: Version,
        on_chunk: ChunkCallback | None,
    ) -> tuple[Completion, bool]:
        """And whether its pieces were told with the right versions."""
        is_streamed, name = on_chunk is not None, self._newest[version.policy].name
        body = request_body(
            prompt_ids,
            sampling,
            self.snapshot(version),
            salt=cache_salt(version),
            is_streamed=is_streamed,
            model=name,
        )
        parser = CompletionParser(lambda: version, on_chunk)
        self._uses[name] += 1
        try:
            await self.supervisor.ask(body, parser, is_streamed=is_streamed)
        finally:
            self._uses[name] -= 1
        return parser.completion({BASE: version}), parser.spans_matched

    async def load(self, target: LoadedVersion) -> None:
        policy = target.version.policy
        before = self._newest.get(policy)
        if before is not None and self.live(policy) is not None and before.loaded == target:
            return  # brought back with it by the keeper
        base = self._files.digest(target.folder)
        self._check(before, target, base)
        if self._is_lost:
            await self._start_serving(target)
            self._base = base
        await self._load_adapter(target)
        await self.unload_unused()

    def remove_policy(self, policy: PolicyName | None) -> None:
        """An engine of this policy is no more. Its answers end by themselves, and its adapter with
        the last of them."""
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
        """Unload what nobody needs; a later try follows where that fails."""
        needed = {adapter.name for adapter in self._newest.values()}
        for name in sorted(self._names - needed):
            if not self._uses[name]:
                try:
                    await self.supervisor.control.unload_adapter(name)
                except EngineError as error:
                    log.warning("an old adapter stays on the server", name=name, why=str(error))
                    continue
                self._names.discard(name)
                del self._uses[name]

    async def _load_adapter(self, target: LoadedVersion) -> None:
        if len(self._names) >= MAX_ADAPTERS:
            await self.unload_unused()
        if len(self._names) >= MAX_ADAPTERS:
            raise EngineError(
                f"{len(self._names)} adapters have answers under way, and vLLM has room for "
                f"{MAX_ADAPTERS}; {target.version} is tried again"
            )
        self._num_loads += 1  # names are never used twice, nor are prefixes cached under them
        name = f"{target.version}-{self._num_loads}"
        await self.supervisor.control.load_adapter(name, target.folder)
        self._names.add(name)
        self._newest[target.version.policy] = _Adapter(name, target)

    async def _start_serving(self, target: LoadedVersion) -> None:
        """A server with the base, and on it what was live before."""
        self._names.clear()
        if not await self.supervisor.start(target.folder):
            raise EngineError(
                "adapters need a vLLM that the node starts by itself on their base; leave "
                "models.NAME.vllm.url out"
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
                f"{target.folder} holds an adapter of another base than vLLM serves; policies that "
                "share an engine start from one `init`, and keep it for the run"
            )
