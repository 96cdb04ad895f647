# SPDX-License-Identifier: Apache-2.0
"""The `simulated` engine: no model; latencies, lengths and failures follow given distributions.
For load and scheduling tests.

All random draws are hashes of (engine seed, request seed), so a run is repeatable except for its
timing. Tokens are uniform over the vocabulary; at temperature 0 they follow from the prompt. A
token belongs to the version that was live when it would have been sampled.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from penstock.errors import EngineError
from penstock.gateway.generation import ChunkCallback, Completion, GenerationRequest, TokenChunk
from penstock.rollout.engine import CLOSED, EngineType, SpanLog, live_for
from penstock.rollout.snapshot import Snapshot, read_snapshot
from penstock.seeds import derive
from penstock.types import FinishReason, PolicyName, Version

_NORMAL = NormalDist()
CHUNK_INTERVAL_S = 0.02
"""Shortest time between two chunks of one answer."""
CLOCK_ERROR_S = 1e-3
"""A timer may fire a little early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadProfile:
    first_token_s: float = 0.0
    """Median time to the first token."""
    token_s: float = 0.0
    """Time between two tokens."""
    median_tokens: float | None = None
    """Median answer length; None always uses all of `max_tokens`."""
    spread: float = 0.5
    """Sigma of the log-normal around both medians; 0 makes them exact."""
    failure_probability: float = 0.0


class SimulatedEngine:
    def __init__(self, load: LoadProfile | None = None, *, seed: int = 0) -> None:
        self._load = load or LoadProfile()
        self._seed = seed
        self._history: list[tuple[float, Version]] = []
        """When each version went live, by the clock of the engine."""
        self._snapshot: Snapshot | None = None
        self._pending: set[asyncio.Future[None]] = set()
        self._is_closed = False
        self._paused_at: float | None = None
        self._paused_s = 0.0
        """In all, before the pause in progress."""

    def _now(self) -> float:
        """The clock of the engine: it stops in pauses."""
        now = self._paused_at
        return (asyncio.get_running_loop().time() if now is None else now) - self._paused_s

    async def pause(self) -> int:
        if self._paused_at is None:
            self._paused_at = asyncio.get_running_loop().time()
        return 0  # it has no keys and values

    async def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_s += asyncio.get_running_loop().time() - self._paused_at
            self._paused_at = None
            for future in self._pending:
                _finish(future)  # those that waited for this, too

    @property
    def live(self) -> Version | None:
        return self._history[-1][1] if self._history and not self._is_closed else None

    async def load(self, folder: Path, version: Version) -> None:
        self._snapshot = read_snapshot(folder)
        self._history.append((self._now(), version))

    async def __call__(self, request: GenerationRequest) -> Completion:
        live_for(request.policy, self.live, is_closed=self._is_closed)
        assert self._snapshot is not None
        max_tokens, on_chunk = request.sampling.max_tokens, request.on_chunk
        seed = derive(self._seed, request.sampling.seed)
        answer = seed
        if not request.sampling.temperature:  # greedy: a function of the prompt
            answer = derive(0, zlib.crc32(array("i", request.prompt_ids).tobytes()))
        num_tokens = self._num_tokens(answer, max_tokens)
        delay_s = self._lognormal(self._load.first_token_s, derive(seed, 0))
        first_at = self._now() + delay_s
        vocab_size = self._snapshot.vocab_size
        ids = [int(_unit(derive(answer, 3 + at)) * vocab_size) for at in range(num_tokens)]
        if on_chunk is None:
            await self._sleep_until(first_at + self._load.token_s * (num_tokens - 1))
            spans = self._spans(first_at, num_tokens)
        else:
            spans = await self._stream(on_chunk, ids, first_at, request.policy)
        if _unit(derive(seed, 2)) < self._load.failure_probability:
            raise EngineError("simulated failure (see failure_probability in the config)")
        finish = FinishReason.STOP if num_tokens < max_tokens else FinishReason.LENGTH
        return spans.complete(ids, [-math.log(vocab_size)] * num_tokens, finish)

    async def close(self) -> None:
        self._is_closed = True
        for future in self._pending:
            if not future.done():
                future.set_exception(EngineError(CLOSED))

    async def _stream(
        self, on_chunk: ChunkCallback, ids: Sequence[int], first_at: float, policy: PolicyName
    ) -> SpanLog:
        """Stream tokens when they are due, several per chunk if they are fast; return their spans,
        which are also the answer's."""
        num_sent, spans, when = 0, SpanLog(live_for(policy, self.live)), first_at
        logprob = -math.log(self._snapshot.vocab_size) if self._snapshot else 0.0
        while num_sent < len(ids):
            await self._sleep_until(when)
            now = self._now()
            due = max(num_sent + 1, self._num_due(now - first_at, len(ids)))
            for span in self._spans(first_at, due).spans(due):
                start = max(span.start, num_sent)
                if start < span.end:
                    version = Version(
                        policy=policy, incarnation=span.incarnation, number=span.number
                    )
                    spans.switch(start, version)
                    logprobs = [logprob] * (span.end - start)
                    chunk = ids[start : span.end]
                    on_chunk(TokenChunk(sampled_ids=chunk, logprobs=logprobs, version=version))
            num_sent = due
            when = max(first_at + self._load.token_s * num_sent, now + CHUNK_INTERVAL_S)
        return spans

    def _num_due(self, elapsed_s: float, num_tokens: int) -> int:
        token_s = self._load.token_s
        return num_tokens if not token_s else min(num_tokens, int(elapsed_s / token_s) + 1)

    async def _sleep_until(self, when: float) -> None:
        """Sleep with one timer per request, not per token: thousands run concurrently."""
        while True:
            await self._sleep(when)
            if self._paused_at is None and self._now() >= when - CLOCK_ERROR_S:
                return

    async def _sleep(self, when: float) -> None:
        """Until then, or until a pause ends."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        is_paused = self._paused_at is not None
        timer = None if is_paused else loop.call_at(when + self._paused_s, _finish, future)
        self._pending.add(future)
        try:
            await future
        finally:
            self._pending.discard(future)
            if timer is not None:
                timer.cancel()

    def _num_tokens(self, seed: int, max_tokens: int) -> int:
        median = self._load.median_tokens
        if median is None:
            return max_tokens
        return min(max_tokens, max(1, round(self._lognormal(median, derive(seed, 1)))))

    def _lognormal(self, median: float, seed: int) -> float:
        unit = max(_unit(seed), 1e-12)
        return median * math.exp(self._load.spread * _NORMAL.inv_cdf(unit))

    def _spans(self, first_at: float, num_tokens: int) -> SpanLog:
        times = [when for when, _ in self._history]
        at = max(0, bisect_right(times, first_at) - 1)
        spans = SpanLog(self._history[at][1])
        for when, version in self._history[at + 1 :]:
            token_s = self._load.token_s
            index = math.ceil((when - first_at) / token_s) if token_s else num_tokens
            if index < num_tokens:
                spans.switch(index, version)
        return spans


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _unit(seed: int) -> float:
    """Map a 63-bit seed to [0, 1)."""
    return (seed >> 10) * 2.0**-53


ENGINE = EngineType(
    build=lambda settings: SimulatedEngine(seed=settings.seed), serves_adapters=True
)
