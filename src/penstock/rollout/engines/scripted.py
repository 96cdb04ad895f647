# SPDX-License-Identifier: Apache-2.0
"""The `scripted` engine: returns scripted answers, for unit tests and dry runs.

It does not sample, so every log-prob is 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.errors import EngineError
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engine import CLOSED, EngineType, SpanLog, live_for
from penstock.rollout.snapshot import Snapshot, read_snapshot
from penstock.types import FinishReason, SamplingSpec, Version

Script = Callable[[Sequence[int], SamplingSpec], Sequence[int]]


def echo(prompt_ids: Sequence[int], sampling: SamplingSpec) -> Sequence[int]:
    """The first `max_tokens` tokens of the prompt, reversed."""
    return list(prompt_ids[: sampling.max_tokens])[::-1]


class ScriptedEngine:
    """Answers from a function of prompt and spec, or from a list with one entry per request."""

    def __init__(self, script: Script | Sequence[Sequence[int]] = echo) -> None:
        self._answers = None if callable(script) else iter(script)
        self._script: Script | None = script if callable(script) else None
        self._snapshot: Snapshot | None = None
        self._live: Version | None = None
        self._is_closed = False

    @property
    def live(self) -> Version | None:
        return None if self._is_closed else self._live

    async def load(self, folder: Path, version: Version) -> None:
        self._snapshot = read_snapshot(folder)
        self._live = version

    async def __call__(self, request: GenerationRequest) -> Completion:
        version = live_for(request.policy, self._live, is_closed=self._is_closed)
        sampling, on_chunk = request.sampling, request.on_chunk
        answer = self._next(request)[: sampling.max_tokens]
        spans = SpanLog(version)
        for index in range(len(answer)):
            await asyncio.sleep(0)  # one decoding step: other tasks run, weights may be swapped
            if self._is_closed:
                break
            if self._live != version:
                version = live_for(request.policy, self._live)
                spans.switch(index, version)
            if on_chunk is not None:
                on_chunk(TokenChunk(sampled_ids=[answer[index]], logprobs=[0.0], version=version))
        if self._is_closed:
            raise EngineError(CLOSED)
        assert self._snapshot is not None
        has_ended = len(answer) < sampling.max_tokens or answer[-1] in self._snapshot.stop_ids
        finish = FinishReason.STOP if has_ended else FinishReason.LENGTH
        return spans.complete(answer, [0.0] * len(answer), finish)

    async def close(self) -> None:
        self._is_closed = True

    def _next(self, request: GenerationRequest) -> Sequence[int]:
        if self._script is not None:
            return self._script(request.prompt_ids, request.sampling)
        assert self._answers is not None
        answer = next(self._answers, None)
        if answer is None:
            raise EngineError("the script has no answer left; pass a longer list to ScriptedEngine")
        return answer


ENGINE = EngineType(
    build=lambda settings: ScriptedEngine(), serves_adapters=True, is_reproducible=True
)
