# SPDX-License-Identifier: Apache-2.0
"""What the gateway asks of an engine: token ids in, token ids out. Text is the renderer's
business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.types import (
    FinishReason,
    LogProbs,
    PolicyName,
    SamplingSpec,
    TokenIds,
    Version,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, exactly as the engine sampled it."""

    sampled_ids: TokenIds
    """Includes the token that ended the answer, and all tokens of a stop string."""
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...]
    """Cover `sampled_ids` without gap or overlap."""
    finish: FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens of an answer that is still being made, told as they were sampled."""

    sampled_ids: Sequence[int]
    logprobs: Sequence[float]
    version: Version
    """Sampled all of these tokens."""


ChunkCallback = Callable[[TokenChunk], None]
"""Hears the pieces of one answer, in order and without gap; called in the event loop, never
blocks. What the engine returns in the end is the truth, and may hold more than was told."""


class Generate(Protocol):
    async def __call__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        *,
        policy: PolicyName,
        session: str,
        on_chunk: ChunkCallback | None = None,
    ) -> Completion:
        """Raises EngineError; cancelling the call gives the engine's place to somebody else.

        An engine that cannot tell of an answer in the making never calls `on_chunk`."""
        ...
