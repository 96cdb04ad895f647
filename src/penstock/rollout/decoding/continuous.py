# SPDX-License-Identifier: Apache-2.0
"""Continuous batching around any decoder, as an engine for one policy.

Requests and swaps go to a decoding thread. Rows keep their tokens across a swap and are prefilled
again under the new weights, so no token is lost and each span names the version that sampled it.
`share` returns an engine for another policy on the same thread and base weights. Owns the
event-loop side; `decoding_thread` owns the rest. Does not import torch.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from pathlib import Path

import structlog

from penstock.errors import EngineError, wrap_errors
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.hub import read_text_file
from penstock.rollout.decoding.batch import Decoder, Row, Staged
from penstock.rollout.decoding.decoding_thread import (
    IMPORT_LOCK,
    DecodingThread,
    Lane,
    Pause,
    Swap,
    fail,
    resolve,
)
from penstock.rollout.engine import CLOSED, SpanLog, live_for
from penstock.types import Version
from penstock.weights.patches import find_patch

log = structlog.get_logger(__name__)
MAX_ROWS = 1024
"""Most answers of a policy decoded together; further requests wait."""


class ContinuousEngine:
    """Serves requests of one policy from one event loop."""

    returns_lost = True

    def __init__(
        self, thread: DecodingThread, *, max_rows: int = MAX_ROWS, keeps_kv: bool = False
    ) -> None:
        """keeps_kv: swaps keep the keys and values of running answers."""
        self._thread = thread
        self._max_rows = max_rows
        self._lane = Lane(max_rows, keeps_kv)
        self._unsent: list[Row] = []
        self._loaded: Path | None = None
        """Folder of the live weights; None if they are unknown."""
        self._num_patches = 0
        """Since the full files were loaded."""
        self._load_lock = asyncio.Lock()
        thread.add(self._lane)

    def share(self) -> ContinuousEngine:
        """An engine for another policy's adapters on the same base model."""
        keeps_kv = self._lane.keeps_kv
        return ContinuousEngine(self._thread, max_rows=self._max_rows, keeps_kv=keeps_kv)

    @property
    def live(self) -> Version | None:
        return None if self._lane.is_closed else self._lane.live

    @property
    def loaded(self) -> Path | None:
        """The folder of its weights, from which a patch may lead to the next version."""
        return None if self._lane.is_closed else self._loaded

    @property
    def num_patches(self) -> int:
        """Patches applied since the full files were loaded."""
        return self._num_patches

    @property
    def paused_s(self) -> float:
        """How long the last swap paused decoding."""
        return self._lane.paused_s

    async def __call__(self, request: GenerationRequest) -> Completion:
        return await self.start(request)

    def start(self, request: GenerationRequest) -> asyncio.Future[Completion]:
        """See `Startable`."""
        version = live_for(request.policy, self._lane.live, is_closed=self._lane.is_closed)
        if self._lane.loop is None:
            self._lane.loop = asyncio.get_running_loop()
        loop = self._lane.loop
        future: asyncio.Future[Completion] = loop.create_future()
        self._unsent.append(Row(request, future, SpanLog(version)))
        if len(self._unsent) == 1:
            # In the next event-loop iteration, so that a burst of requests wakes the thread once.
            loop.call_soon(self._flush)
        return future

    async def load(self, folder: Path, version: Version) -> None:
        name = self._thread.name
        async with self._load_lock:
            with wrap_errors(EngineError, f"engine {name} opening its decoder"):
                decoder = await asyncio.shield(asyncio.wrap_future(self._lane.opened))
            patch = find_patch(self._loaded, folder)
            if patch is not None and await self._swap(decoder, folder, version, patch):
                return
            await self._swap(decoder, folder, version, None)

    async def _swap(
        self, decoder: Decoder, folder: Path, version: Version, patch: Path | None
    ) -> bool:
        """Make the version live; False if a patch does not fit, or leaves wrong bits."""
        name = self._thread.name
        try:
            with wrap_errors(EngineError, f"engine {name} loading {version} from {folder}"):
                staged = await asyncio.to_thread(self._stage, decoder, folder, patch)
        except EngineError as error:
            if patch is None:
                raise
            log.warning("patch does not fit, loading full files", error=str(error))
            return False
        if self._lane.is_closed:
            raise EngineError(CLOSED)
        done: Future[None] = Future()
        self._loaded = None  # unknown until the swap has succeeded
        self._thread.put(self._lane, Swap(staged, version, done))
        await asyncio.wrap_future(done)
        self._num_patches = 0 if staged.verify is None else self._num_patches + 1
        if staged.verify is not None:
            problem = await asyncio.to_thread(staged.verify, self._num_patches)
            if problem is not None:
                log.error(
                    "wrong bits after a patch, loading full files",
                    version=str(version),
                    error=problem,
                )
                return False
        self._loaded = None if staged.snapshot.adapter is not None else folder
        return True

    async def pause(self) -> int:
        return await self._pause(True)

    async def resume(self) -> None:
        await self._pause(False)

    async def _pause(self, is_paused: bool) -> int:
        if self._lane.is_closed:
            raise EngineError(CLOSED)
        done: Future[int] = Future()
        self._thread.put(self._lane, Pause(is_paused, done))
        return await asyncio.wrap_future(done)

    async def close(self) -> None:
        if not self._lane.is_closed:
            self._flush()
            self._lane.is_closed = True
            self._thread.put(self._lane, None)
        if self._lane.opened.done():
            await asyncio.to_thread(self._lane.ended.wait)

    def _flush(self) -> None:
        rows, self._unsent = self._unsent, []
        if self._lane.is_closed:
            resolve(fail(rows, EngineError(CLOSED)))
        elif rows:
            self._thread.put(self._lane, rows)

    def _stage(self, decoder: Decoder, folder: Path, patch: Path | None) -> Staged:
        with IMPORT_LOCK:
            staged = decoder.stage(folder, patch)
        path = folder / "tokenizer.json"
        if self._lane.tokenizer is None and path.exists():
            from tokenizers import Tokenizer  # an optional dependency

            # Only once: a policy's vocabulary never changes, and reading a large one is slow.
            self._lane.tokenizer = Tokenizer.from_buffer(read_text_file(path))
        return staged
