# SPDX-License-Identifier: Apache-2.0
"""A vLLM server with one policy's full model, whose weights are swapped during running answers.

vLLM reports versions only with the last chunk, so each earlier chunk gets the version that was
labeled last when its bytes are read. This is exact: while paused, vLLM samples nothing and sends
all sampled tokens, and the label changes only then, at least three round trips after the pause. A
completion whose spans differ from its streamed chunks is logged.

A swap: check the folder → pause (keep) → load in the workers → drop the prefix cache → label →
resume. If a patch leads from the loaded version to the new one, the workers prepare it beside the
running answers, only apply it in the pause, and verify it afterwards; if it does not fit, or leaves
wrong bits, the full files are loaded.

Requests also carry the version as cache salt. With `keeps_kv` nothing is dropped, and the salt is
the version of the session's first request: so keys and values are reused only under the same salt,
are never older than that version, and each answer names it.

If a step before the load fails, the old version stays live. If a later step fails, the old weights
are restored. If that also fails, no version is live, and the server is restarted with the last
folder that was loaded completely.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from penstock.errors import EngineError
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.adapter_info import check_same_layers, tensor_files
from penstock.rollout.engines.vllm.control import Control
from penstock.rollout.engines.vllm.generate_api import CompletionParser, request_body
from penstock.rollout.engines.vllm.server import Server
from penstock.rollout.engines.vllm.supervisor import Supervisor
from penstock.rollout.snapshot import Snapshot
from penstock.types import PolicyName, Version
from penstock.weights.patches import find_patch, tensors_to_verify

MAX_SESSIONS = 65_536
"""Sessions whose cached prefixes are found again, if keys and values are kept."""
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    folder: Path
    version: Version
    snapshot: Snapshot


class FullModel:
    def __init__(
        self,
        server: Server,
        *,
        stall_s: float,
        keeps_kv: bool = False,
        records_experts: bool = False,
    ) -> None:
        self._records_experts = records_experts
        self.supervisor = Supervisor(server, self, stall_s=stall_s)
        self.paused_s = 0.0
        self.num_patches = 0
        """Patches applied since the full files were loaded."""
        self.num_bytes_read = 0
        """By the workers, for the last swap."""
        self._keeps_kv = keeps_kv
        self._salts: dict[str, Version] = {}
        """First version of each session, oldest first, if keys and values are kept."""
        self._live: Version | None = None
        self._loaded: LoadedVersion | None = None
        """The last version that was loaded completely; not live while the server is down."""
        self._versions: dict[str, Version] = {}

    def live(self, policy: PolicyName) -> Version | None:
        return self._live if self.supervisor.is_running else None

    async def answer(self, request: GenerationRequest, version: Version) -> Completion:
        assert self._loaded is not None
        snapshot, num_experts = self._loaded.snapshot, 0
        if self._records_experts:  # only full responses carry them
            request, num_experts = replace(request, on_chunk=None), snapshot.num_experts
        salt = self._salt(request.session, version) if self._keeps_kv else version
        body = request_body(request, snapshot, salt)
        kv = (salt.incarnation, salt.number) if self._keeps_kv else None
        parser = CompletionParser(self._serving, request, kv, num_experts=num_experts)
        await self.supervisor.generate(body, parser)
        return parser.completion(self._versions)

    async def load(self, target: LoadedVersion) -> None:
        if self._live is not None and target == self._loaded:
            return  # already restored by the supervisor
        _check_same_model(self._loaded, target)
        if self._live is None:
            await self._start_serving(target)
        else:
            await self._swap(target)

    @property
    def loaded(self) -> Path | None:
        """The folder from which a patch may lead to the next version."""
        return None if self._loaded is None or self._live is None else self._loaded.folder

    def remove_policy(self, policy: PolicyName | None) -> None:
        """Nothing to do: a full model serves a single policy."""

    def on_server_lost(self) -> None:
        self._live = None

    async def restore(self) -> bool:
        if self._loaded is None:
            return False
        await self._start_serving(self._loaded)
        return True

    async def unload_unused(self) -> None:
        pass

    def _salt(self, session: str, version: Version) -> Version:
        if len(self._salts) >= MAX_SESSIONS and session not in self._salts:
            del self._salts[next(iter(self._salts))]
        return self._salts.setdefault(session, version)

    def _serving(self) -> Version:
        """The version that sampled the tokens arriving now."""
        assert self._loaded is not None
        return self._loaded.version

    async def _start_serving(self, target: LoadedVersion) -> None:
        """Start the server, from any state, and make the version live."""
        has_weights = await self.supervisor.start(target.folder)
        control = self.supervisor.control
        if not has_weights:
            await control.check(target.folder)
            await control.pause()
            await control.load(target.folder)
        await self._label(control, target)
        await control.resume()
        await control.check_logprobs()
        self._loaded, self._live, self.num_patches = target, target.version, 0
        self._salts.clear()
        self.supervisor.mark_up()

    async def _swap(self, target: LoadedVersion) -> None:
        assert self._loaded is not None
        control = self.supervisor.control
        patch = find_patch(self._loaded.folder, target.folder)
        if patch is not None and await self._patch(control, target, patch):
            return
        await control.check(target.folder)
        await self._exchange(control, target, lambda: control.load(target.folder))
        self.num_patches, self.num_bytes_read = 0, weight_bytes(target.folder)

    async def _patch(self, control: Control, target: LoadedVersion, patch: Path) -> bool:
        """Change the loaded weights; False if they must be loaded from full files after all."""
        try:
            self.num_bytes_read = await control.prepare_patch(patch, target.folder)
        except EngineError as error:
            log.warning("patch does not fit, loading full files", error=str(error))
            return False
        await self._exchange(control, target, control.apply_patch)
        self.num_patches += 1
        try:
            names = tensors_to_verify(target.snapshot.tensors, self.num_patches)
            await control.verify_patch(names)
        except EngineError as error:
            log.error("wrong bits after a patch, loading full files", error=str(error))
            return False
        return True

    async def _exchange(
        self, control: Control, target: LoadedVersion, load: Callable[[], Awaitable[None]]
    ) -> None:
        """Pause, change the weights with `load`, label them and resume; roll back if it fails."""
        assert self._loaded is not None
        before = self._loaded
        started_at = time.monotonic()
        try:
            await control.pause(keeps_kv=self._keeps_kv)
            await load()
            await self._label(control, target)
            self._loaded = target
            await control.resume()
        except BaseException as error:
            self._loaded = before
            if not await self._roll_back(control, before):
                self.supervisor.mark_lost(f"swap to {target.version} failed: {error}")
            raise
        self._live = target.version
        self.supervisor.mark_up()
        self.paused_s = time.monotonic() - started_at

    async def _roll_back(self, control: Control, before: LoadedVersion) -> bool:
        try:
            await control.pause()
            await control.load(before.folder)
            self.num_patches = 0
            await self._label(control, before)
            await control.resume()
        except EngineError as error:
            log.error("rollback failed", version=str(before.version), error=str(error))
            return False
        return True

    async def _label(self, control: Control, target: LoadedVersion) -> None:
        """Label the loaded weights and drop cached prefixes of older ones, unless they are kept."""
        self._versions[str(target.version)] = target.version
        if not self._keeps_kv:
            await control.reset_prefix_cache()
        await control.label(str(target.version))


def _check_same_model(before: LoadedVersion | None, target: LoadedVersion) -> None:
    """Raise EngineError if the tensors differ; a missing one would silently keep its old value."""
    if target.snapshot.adapter is not None:
        check_same_layers(None, target.snapshot.adapter, target.folder)
    if before is None:
        return
    old, new = set(before.snapshot.tensors), set(target.snapshot.tensors)
    if old != new:
        missing, unknown = sorted(old - new), sorted(new - old)
        raise EngineError(
            f"{target.folder} has a different model: {len(missing)} tensors missing "
            f"{missing[:3]}, {len(unknown)} unknown {unknown[:3]}; a policy cannot change its "
            "architecture during a run"
        )


def weight_bytes(folder: Path) -> int:
    """Size of all weights of a version."""
    return sum(path.stat().st_size for path in tensor_files(folder))
