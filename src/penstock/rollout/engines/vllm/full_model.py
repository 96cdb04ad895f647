# SPDX-License-Identifier: Apache-2.0
"""A vLLM server that holds one policy's model, whose weights are swapped under running answers.

vLLM names no version in the pieces before the last, so a piece takes the version whose label was
set last when its bytes are read. That is exact: while vLLM is paused it samples nothing and sends
all it had sampled, and the label changes only then, at least three round trips after the pause. A
completion whose spans differ from the pieces told is reported.

A swap: check the folder → pause (keep) → load in the workers → drop the prefix cache → label →
resume. Requests carry the version as cache salt besides. What fails before the load leaves the old
version serving; what fails later puts the old weights back; when that fails too, nothing is live
and the server is brought up anew with the last folder that was loaded whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.errors import EngineError
from penstock.gateway.generation import ChunkCallback, Completion
from penstock.rollout.adapter_info import check_same_layers
from penstock.rollout.engines.vllm.control import Control
from penstock.rollout.engines.vllm.generate_api import CompletionParser, request_body
from penstock.rollout.engines.vllm.server import Server
from penstock.rollout.engines.vllm.supervisor import Supervisor
from penstock.rollout.snapshot import Snapshot
from penstock.types import PolicyName, SamplingSpec, Version

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    folder: Path
    version: Version
    snapshot: Snapshot


class FullModel:
    def __init__(self, server: Server, *, stall_s: float) -> None:
        self.supervisor = Supervisor(server, self, stall_s=stall_s)
        self.paused_s = 0.0
        self._live: Version | None = None
        self._loaded: LoadedVersion | None = None
        """The last that was loaded whole; not live while the server is down."""
        self._versions: dict[str, Version] = {}

    def live(self, policy: PolicyName) -> Version | None:
        return self._live if self.supervisor.is_running else None

    def snapshot(self, version: Version) -> Snapshot:
        assert self._loaded is not None
        return self._loaded.snapshot

    async def answer(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        version: Version,
        on_chunk: ChunkCallback | None,
    ) -> tuple[Completion, bool]:
        """And whether its pieces were told with the right versions."""
        is_streamed = on_chunk is not None
        body = request_body(
            prompt_ids,
            sampling,
            self.snapshot(version),
            salt=cache_salt(version),
            is_streamed=is_streamed,
        )
        parser = CompletionParser(self._serving, on_chunk)
        await self.supervisor.ask(body, parser, is_streamed=is_streamed)
        return parser.completion(self._versions), parser.spans_matched

    async def load(self, target: LoadedVersion) -> None:
        if self._live is not None and target == self._loaded:
            return  # brought back with it by the keeper
        _check_same_model(self._loaded, target)
        if self._live is None:
            await self._start_serving(target)
        else:
            await self._swap(target)

    def remove_policy(self, policy: PolicyName | None) -> None:
        """There is no other engine that could stay."""

    def on_server_lost(self) -> None:
        self._live = None

    async def restore(self) -> bool:
        if self._loaded is None:
            return False
        await self._start_serving(self._loaded)
        return True

    async def unload_unused(self) -> None:
        pass

    def _serving(self) -> Version:
        """What tokens that arrive now were sampled by."""
        assert self._loaded is not None
        return self._loaded.version

    async def _start_serving(self, target: LoadedVersion) -> None:
        """A server that serves this, from whatever state it was in."""
        has_weights = await self.supervisor.start(target.folder)
        control = self.supervisor.control
        if not has_weights:
            await control.check(target.folder)
            await control.pause()
            await control.load(target.folder)
        await self._label(control, target)
        await control.resume()
        await control.check_logprobs()
        self._loaded, self._live = target, target.version
        self.supervisor.mark_up()

    async def _swap(self, target: LoadedVersion) -> None:
        assert self._loaded is not None
        before, control = self._loaded, self.supervisor.control
        await control.check(target.folder)
        started_at = time.monotonic()
        try:
            await control.pause()
            await control.load(target.folder)
            await self._label(control, target)
            self._loaded = target
            await control.resume()
        except BaseException as error:
            self._loaded = before
            if not await self._roll_back(control, before):
                self.supervisor.mark_lost(f"swap to {target.version} failed half-way: {error}")
            raise
        self._live = target.version
        self.supervisor.mark_up()
        self.paused_s = time.monotonic() - started_at

    async def _roll_back(self, control: Control, before: LoadedVersion) -> bool:
        try:
            await control.pause()
            await control.load(before.folder)
            await self._label(control, before)
            await control.resume()
        except EngineError as error:
            log.error("the old weights do not go back", version=str(before.version), why=str(error))
            return False
        return True

    async def _label(self, control: Control, target: LoadedVersion) -> None:
        """The weights are in; from here on tokens are theirs, and nothing older is reused."""
        self._versions[str(target.version)] = target.version
        await control.reset_prefix_cache()
        await control.label(str(target.version))


def cache_salt(version: Version) -> str:
    """vLLM takes no @ there."""
    return f"{version.policy}.{version.incarnation}.{version.number}"


def _check_same_model(before: LoadedVersion | None, target: LoadedVersion) -> None:
    """A swap with a tensor less would leave the old one in place under the new name."""
    if target.snapshot.adapter is not None:
        check_same_layers(None, target.snapshot.adapter, target.folder)
    if before is None:
        return
    old, new = set(before.snapshot.tensors), set(target.snapshot.tensors)
    if old != new:
        missing, unknown = sorted(old - new), sorted(new - old)
        raise EngineError(
            f"{target.folder} holds another model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}; a policy keeps its architecture for the run"
        )
