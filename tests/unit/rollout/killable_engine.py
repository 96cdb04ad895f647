# SPDX-License-Identifier: Apache-2.0
"""Engines that die on command, for tests of pools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import EngineError
from penstock.gateway.generation import ChunkCallback, Completion, GenerationRequest, TokenChunk
from penstock.rollout.engine import Engine, SpanLog
from penstock.types import FinishReason, SamplingSpec, Version, log_probs, token_ids


@dataclass(slots=True)
class Paused:
    """How many engines of a pool are in `load`: now, and at most."""

    now: int = 0
    peak: int = 0


class KillableEngine:
    """Samples token (length of its context) % 97. Its fields control its faults."""

    def __init__(self, paused: Paused | None = None, *, token_s: float = 0.0) -> None:
        self.live: Version | None = None
        self.paused = paused or Paused()
        self.token_s = token_s
        self.asked: list[tuple[list[int], SamplingSpec]] = []
        self.loads: list[Version] = []
        self.num_cancelled = 0
        self.dies_after: int | None = None
        """Tokens streamed of the next answer before the engine dies."""
        self.fails_with: EngineError | None = None
        """Error of every answer; the engine stays alive."""
        self.gives_up_after: int | None = None
        """Tokens of an aborted answer; the last one is not streamed."""
        self.load_fails = False
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.streams_nothing = False
        """Returns answers without streaming chunks."""
        self.chunk_callbacks: list[ChunkCallback] = []

    async def load(self, folder: Path, version: Version) -> None:
        self.paused.now += 1
        self.paused.peak = max(self.paused.peak, self.paused.now)
        try:
            await asyncio.sleep(0.001)
            await self.may_load.wait()
            if self.load_fails:
                raise EngineError("no memory")
            self.loads.append(version)
            self.live = version
        finally:
            self.paused.now -= 1

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.asked.append((list(request.prompt_ids), request.sampling))
        if self.fails_with is not None:
            raise self.fails_with
        if request.on_chunk is not None:
            self.chunk_callbacks.append(request.on_chunk)
        try:
            return await self._sample(len(request.prompt_ids), request.sampling, request.on_chunk)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise

    async def _sample(
        self, length: int, sampling: SamplingSpec, on_chunk: ChunkCallback | None
    ) -> Completion:
        sampled: list[int] = []
        spans: SpanLog | None = None
        finish = FinishReason.LENGTH
        while len(sampled) < sampling.max_tokens and finish is not FinishReason.ABORT:
            await asyncio.sleep(self.token_s)
            if self.dies_after == len(sampled):
                self.dies_after, self.live = None, None
            if self.live is None:
                raise EngineError("connection reset")
            spans = spans or SpanLog(self.live)
            spans.switch(len(sampled), self.live)
            token = (length + len(sampled)) % 97
            sampled.append(token)
            if self.gives_up_after == len(sampled):
                finish = FinishReason.ABORT
            elif on_chunk is not None and not self.streams_nothing:
                on_chunk(TokenChunk(sampled_ids=[token], logprobs=[-token / 8], version=self.live))
        return Completion(
            sampled_ids=token_ids(sampled),
            logprobs=log_probs([-token / 8 for token in sampled]),
            spans=spans.spans(len(sampled)) if spans else (),
            finish=finish,
        )

    async def close(self) -> None:
        self.live = None


class Restartable:
    """A real engine that can be killed; the next load starts a new one."""

    def __init__(self, make: Callable[[], Engine], paused: Paused | None = None) -> None:
        self._make = make
        self._engine: Engine | None = make()
        self._paused = paused or Paused()

    @property
    def live(self) -> Version | None:
        return self._engine.live if self._engine is not None else None

    @property
    def paused_s(self) -> float:
        return getattr(self._engine, "paused_s", 0.0)

    @property
    def loaded(self) -> Path | None:
        return getattr(self._engine, "loaded", None)

    @property
    def num_patches(self) -> int:
        """Patches since the last full load."""
        model = getattr(self._engine, "full_model", None) or self._engine
        return getattr(model, "num_patches", 0)

    async def kill(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def load(self, folder: Path, version: Version) -> None:
        engine = self._engine = self._engine or self._make()
        is_pausing = engine.live is not None
        self._paused.now += is_pausing
        self._paused.peak = max(self._paused.peak, self._paused.now)
        try:
            await engine.load(folder, version)
        finally:
            self._paused.now -= is_pausing

    async def __call__(self, request: GenerationRequest) -> Completion:
        if self._engine is None:
            raise EngineError("connection refused")
        return await self._engine(request)

    async def close(self) -> None:
        await self.kill()
