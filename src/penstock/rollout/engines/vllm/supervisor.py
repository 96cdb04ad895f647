# SPDX-License-Identifier: Apache-2.0
"""Supervises one vLLM server: its connection, running requests, health and restarts.

Health means progress: a server with waiting requests whose token counters do not change for
`stall_s` is dead, even if /health succeeds. Requests of a dead server fail immediately, and it is
restarted automatically. Its `ServedModel` decides which weights it then serves.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog

from penstock.errors import EngineError, RequestRejected
from penstock.rollout.engine import CLOSED
from penstock.rollout.engines.vllm.control import Control
from penstock.rollout.engines.vllm.generate_api import CompletionParser
from penstock.rollout.engines.vllm.server import Server
from penstock.rollout.http_client import HttpClient

WATCH_S = 1.0
MAX_RETRY_S = 60.0
log = structlog.get_logger(__name__)


class ServedModel(Protocol):
    """Decides what a server serves. All methods are called with the supervisor's lock held."""

    def on_server_lost(self) -> None:
        """The server is lost: no version is live."""
        ...

    async def restore(self) -> bool:
        """Reload the versions that were live; False if there were none."""
        ...

    async def unload_unused(self) -> None:
        """Unload unused adapters; called periodically while the server is healthy."""
        ...


class Supervisor:
    def __init__(self, server: Server, served: ServedModel, *, stall_s: float) -> None:
        self.lock = asyncio.Lock()
        """Held while the served versions change."""
        self.client: HttpClient | None = None
        self._server = server
        self._served = served
        self._stall_s = stall_s
        self._lost_reason: str | None = None
        """Why the server must be restarted; None while it is healthy."""
        self._watcher: asyncio.Task[None] | None = None
        self._suspected = asyncio.Event()
        self._num_waiting = 0
        self._last_progress_at = 0.0
        self._num_tokens: float = -1.0

    @property
    def is_running(self) -> bool:
        return self._server.is_running

    @property
    def url(self) -> str | None:
        return None if self.client is None else self.client.url

    @property
    def control(self) -> Control:
        assert self.client is not None, "the server was started"
        return Control(self.client)

    async def start(self, folder: Path) -> bool:
        """Start a new server, from any state; returns whether it has loaded the folder."""
        if self.client is not None:
            self.client.abort("the engine is restarting")
        url, has_weights = await self._server.start(folder)
        self.client = HttpClient(url)
        return has_weights

    def mark_up(self) -> None:
        """Mark the server healthy, and start watching it."""
        self._lost_reason = None
        self._last_progress_at = time.monotonic()
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch(), name="vllm-watch")

    def mark_lost(self, why: str) -> None:
        log.error("vLLM lost", reason=why, num_waiting=self._num_waiting)
        self._lost_reason = why
        self._served.on_server_lost()
        if self.client is not None:
            self.client.abort(f"vLLM was lost: {why}")

    async def close(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            with suppress(asyncio.CancelledError):
                await self._watcher
        if self.client is not None:
            self.client.abort(CLOSED)
        await self._server.stop()

    # --- requests ---------------------------------------------------------------------------------

    async def generate(self, body: bytes, parser: CompletionParser) -> None:
        def on_data(data: bytes) -> None:
            self._last_progress_at = time.monotonic()
            parser.feed(data)

        assert self.client is not None
        on_body = on_data if parser.is_streamed else None
        if self._num_waiting == 0:
            self._last_progress_at = time.monotonic()
        self._num_waiting += 1
        try:
            reply = await self.client.request(
                "POST", "/inference/v1/generate", body, on_body=on_body
            )
        except OSError as error:
            self._suspected.set()
            why = str(error) or type(error).__name__
            raise EngineError(f"connection to vLLM lost: {why}") from None
        finally:
            self._num_waiting -= 1
            self._last_progress_at = time.monotonic()
        if reply.status != 200:
            response = reply.body.decode(errors="replace")[:1000]
            kind = RequestRejected if reply.status in (400, 422) else EngineError
            if kind is EngineError:
                self._suspected.set()
            raise kind(f"vLLM returned {reply.status} to a generate request: {response}")
        if not parser.is_streamed:
            parser.feed_event(reply.body)

    # --- health -----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """consumes: health of the server · produces: restarts
        waits for: the next check · woken by: the timer, a request whose connection was lost"""
        retry_s = WATCH_S
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(WATCH_S, self._stall_s / 4)):
                    await self._suspected.wait()
            if self._lost_reason is not None:
                await asyncio.sleep(retry_s)
            async with self.lock:
                if self._lost_reason is None and (why := await self._fault()) is not None:
                    self.mark_lost(why)
                if self._lost_reason is None:
                    await self._served.unload_unused()
                    retry_s = WATCH_S
                    continue
                try:
                    if await self._served.restore():
                        log.info("vLLM restarted")
                    retry_s = WATCH_S
                except EngineError as error:
                    log.error("vLLM restart failed", error=str(error), retry_s=retry_s)
                    retry_s = min(2 * retry_s, MAX_RETRY_S)

    async def _fault(self) -> str | None:
        is_suspected = self._suspected.is_set()
        self._suspected.clear()
        if not self._server.is_running:
            return "process exited"
        if is_suspected and self.client and not await self.control.is_healthy():
            return "health check failed"
        quiet_s = time.monotonic() - self._last_progress_at
        if self._num_waiting == 0 or quiet_s < self._stall_s / 2 or self.client is None:
            return None
        try:
            async with asyncio.timeout(self._stall_s):
                num_tokens = await self.control.num_tokens()
        except (EngineError, TimeoutError) as error:
            return f"cannot read its token counters: {error or 'no response'}"
        if num_tokens != self._num_tokens:
            self._num_tokens, self._last_progress_at = num_tokens, time.monotonic()
        elif quiet_s >= self._stall_s:
            return f"stalled: {self._num_waiting} requests waiting, no token for {quiet_s:.0f} s"
        return None
