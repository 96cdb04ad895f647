# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as an engine: token ids in and out, versions swapped under running answers.

Route: `POST /inference/v1/generate`, whose last event or whole answer carries vLLM's own version
spans, counted where the tokens are sampled. With a listener the answer is streamed. vLLM names no
version in the pieces before the last, so a piece takes the version whose label was set last when
its bytes are read. That is exact: while vLLM is paused it samples nothing and sends all it had
sampled, and the label changes only then, at least three round trips after the pause. A completion
whose spans differ from the pieces told is logged.

A swap: check the folder → pause (keep) → load in the workers → drop the prefix cache → label →
resume. Requests carry the version as cache salt besides. What fails before the load leaves the old
version serving; what fails later puts the old weights back; when that fails too, nothing is live
and the server is brought up anew with the last folder that was loaded whole.

Health is progress: a server whose requests wait while its token counters stand still for `stall_s`
is dead, whatever it answers to /health. A dead server's requests fail at once, and it is started
again without being asked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.errors import EngineError, Refused
from penstock.gateway.generate import Completion, Listen
from penstock.rollout.engines.base import CLOSED, live_for
from penstock.rollout.engines.snapshot import Snapshot, read_snapshot
from penstock.rollout.engines.vllm.answers import Hearing, body_of, check_fit
from penstock.rollout.engines.vllm.child import Server
from penstock.rollout.engines.vllm.control import Control
from penstock.rollout.engines.vllm.http import HttpClient
from penstock.types import PolicyName, SamplingSpec, Version

STALL_S = 120.0
"""A prefill of a long context on a slow machine makes no token for a while."""
WATCH_S = 1.0
MOST_RETRY_S = 60.0
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Loaded:
    folder: Path
    version: Version
    snapshot: Snapshot


class VllmEngine:
    def __init__(self, server: Server, *, stall_s: float = STALL_S) -> None:
        self._server = server
        self._stall_s = stall_s
        self._client: HttpClient | None = None
        self._live: Version | None = None
        self._loaded: _Loaded | None = None
        """The last that was loaded whole; not live while the server is down."""
        self._versions: dict[str, Version] = {}
        self._lock = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._is_closed = False
        self._lost: str | None = None
        """Why the server must be brought up anew."""
        self._doubt = asyncio.Event()
        self._num_waiting = 0
        self._moved_at = 0.0
        self._num_tokens: float = -1.0
        self.paused_s = 0.0
        """How long the last swap held answers up."""

    @property
    def live(self) -> Version | None:
        return self._live if self._server.is_running else None

    @property
    def url(self) -> str | None:
        """Where its server listens."""
        return None if self._client is None else self._client.url

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        *,
        policy: PolicyName,
        session: str,
        listen: Listen | None = None,
    ) -> Completion:
        if self._is_closed:
            raise EngineError(CLOSED)
        version = live_for(policy, self.live)
        assert self._client is not None and self._loaded is not None
        snapshot = self._loaded.snapshot
        check_fit(prompt_ids, sampling, snapshot)
        body = body_of(
            prompt_ids, sampling, snapshot, salt=_salt(version), is_streamed=listen is not None
        )
        hearing = Hearing(self._serving, listen)
        self._begin()
        try:
            await self._ask(self._client, body, hearing, is_streamed=listen is not None)
        finally:
            self._num_waiting -= 1
            self._moved_at = time.monotonic()
        completion = hearing.completion(self._versions)
        if not hearing.was_told_right:
            log.warning("pieces were told of another version", session=session)
        return completion

    async def load(self, folder: Path, version: Version) -> None:
        async with self._lock:
            if self._is_closed:
                raise EngineError(CLOSED)
            snapshot = await asyncio.to_thread(read_snapshot, folder)
            wanted = _Loaded(folder, version, snapshot)
            if self._live is not None and wanted == self._loaded:
                return  # brought back with it by the watcher
            if self._loaded is not None:
                _check_same_model(self._loaded, wanted)
            if self._live is None:
                await self._bring_up(wanted)
            else:
                await self._swap(wanted)
            if self._watcher is None:
                self._watcher = asyncio.create_task(self._watch(), name="vllm-watch")

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._live = None
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        if self._client is not None:
            self._client.abort(CLOSED)
        await self._server.stop()

    # --- requests ---------------------------------------------------------------------------------

    def _serving(self) -> Version:
        """What tokens that arrive now were sampled by."""
        assert self._loaded is not None
        return self._loaded.version

    def _begin(self) -> None:
        if self._num_waiting == 0:
            self._moved_at = time.monotonic()
        self._num_waiting += 1

    async def _ask(
        self, client: HttpClient, body: bytes, hearing: Hearing, *, is_streamed: bool
    ) -> None:
        def heard(data: bytes) -> None:
            self._moved_at = time.monotonic()
            hearing.feed(data)

        on_body = heard if is_streamed else None
        try:
            reply = await client.request("POST", "/inference/v1/generate", body, on_body=on_body)
        except OSError as error:
            self._doubt.set()
            raise EngineError(f"vLLM broke off: {str(error) or type(error).__name__}") from None
        if reply.status != 200:
            said = reply.body.decode(errors="replace")[:1000]
            kind = Refused if reply.status in (400, 422) else EngineError
            if kind is EngineError:
                self._doubt.set()
            raise kind(f"vLLM answers {reply.status} to a request: {said}")
        if not is_streamed:
            hearing.take(reply.body)

    # --- versions ---------------------------------------------------------------------------------

    async def _bring_up(self, wanted: _Loaded) -> None:
        """A server that serves this, from whatever state it was in."""
        if self._client is not None:
            self._client.abort("the engine starts anew")
        url, has_weights = await self._server.start(wanted.folder)
        self._client = HttpClient(url)
        control = Control(self._client)
        if not has_weights:
            await control.check(wanted.folder)
            await control.pause()
            await control.load(wanted.folder)
        await self._name(control, wanted)
        await control.resume()
        await control.examine()
        self._loaded, self._live, self._lost = wanted, wanted.version, None
        self._moved_at = time.monotonic()

    async def _swap(self, wanted: _Loaded) -> None:
        assert self._client is not None and self._loaded is not None
        before, control = self._loaded, Control(self._client)
        await control.check(wanted.folder)
        began = time.monotonic()
        try:
            await control.pause()
            await control.load(wanted.folder)
            await self._name(control, wanted)
            self._loaded = wanted
            await control.resume()
        except BaseException as error:
            self._loaded = before
            if not await self._put_back(control, before):
                self._lose(f"swap to {wanted.version} failed half-way: {error}")
            raise
        self._live = wanted.version
        self._moved_at = time.monotonic()
        self.paused_s = self._moved_at - began

    async def _put_back(self, control: Control, before: _Loaded) -> bool:
        try:
            await control.pause()
            await control.load(before.folder)
            await self._name(control, before)
            await control.resume()
        except EngineError as error:
            log.error("the old weights do not go back", version=str(before.version), why=str(error))
            return False
        return True

    async def _name(self, control: Control, wanted: _Loaded) -> None:
        """The weights are in; from here on tokens are theirs, and nothing older is reused."""
        self._versions[str(wanted.version)] = wanted.version
        await control.forget_prefixes()
        await control.label(str(wanted.version))

    # --- health -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """consumes: signs of life · produces: a server that is alive
        waits for: the next look · woken by: time, a request that broke off"""
        retry_s = WATCH_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(WATCH_S, self._stall_s / 4)):
                    await self._doubt.wait()
            if self._lost is not None:
                await asyncio.sleep(retry_s)
            async with self._lock:
                if self._lost is None and (why := await self._fault()) is not None:
                    self._lose(why)
                if self._lost is None or self._loaded is None:
                    retry_s = WATCH_S
                    continue
                try:
                    await self._bring_up(self._loaded)
                    log.info("vLLM is back", version=str(self._loaded.version))
                except EngineError as error:
                    log.error("vLLM does not come back", error=str(error), retry_s=retry_s)
                    retry_s = min(2 * retry_s, MOST_RETRY_S)

    async def _fault(self) -> str | None:
        is_doubted = self._doubt.is_set()
        self._doubt.clear()
        if not self._server.is_running:
            return "its process ended"
        if is_doubted and self._client and not await Control(self._client).is_healthy():
            return "it does not answer"
        quiet_s = time.monotonic() - self._moved_at
        if self._num_waiting == 0 or quiet_s < self._stall_s / 2 or self._client is None:
            return None
        try:
            async with asyncio.timeout(self._stall_s):
                num_tokens = await Control(self._client).num_tokens()
        except (EngineError, TimeoutError) as error:
            return f"it does not count its tokens: {error or 'no answer'}"
        if num_tokens != self._num_tokens:
            self._num_tokens, self._moved_at = num_tokens, time.monotonic()
        elif quiet_s >= self._stall_s:
            return f"{self._num_waiting} requests wait and no token came for {quiet_s:.0f} s"
        return None

    def _lose(self, why: str) -> None:
        log.error("vLLM is lost", why=why, num_waiting=self._num_waiting)
        self._lost, self._live = why, None
        if self._client is not None:
            self._client.abort(f"the engine is lost: {why}")


def _salt(version: Version) -> str:
    """vLLM takes no @ there."""
    return f"{version.policy}.{version.incarnation}.{version.number}"


def _check_same_model(before: _Loaded, wanted: _Loaded) -> None:
    """A swap with a tensor less would leave the old one in place under the new name."""
    old, new = set(before.snapshot.tensors), set(wanted.snapshot.tensors)
    if old != new:
        missing, unknown = sorted(old - new), sorted(new - old)
        raise EngineError(
            f"{wanted.folder} holds another model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}; a policy keeps its architecture for the run"
        )
