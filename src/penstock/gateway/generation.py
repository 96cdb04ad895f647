# SPDX-License-Identifier: Apache-2.0
"""Interface of an engine as the gateway uses it: token ids in, token ids out. The renderer handles
text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Protocol, runtime_checkable

from penstock.types import (
    ExpertChoices,
    FinishReason,
    KvAge,
    LogProbs,
    PolicyName,
    SamplingSpec,
    TokenIds,
    Version,
    VersionSpan,
    log_probs,
    token_ids,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, exactly as the engine sampled it."""

    sampled_ids: TokenIds
    """Includes the end token, and all tokens of a stop string."""
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...]
    """Cover `sampled_ids` without gap or overlap."""
    finish: FinishReason
    kv: KvAge | None = None
    """As in `Turn`."""
    experts: ExpertChoices | None = None
    """Of the last tokens of prompt and answer, if the engine records them."""

    @classmethod
    def of(
        cls, ids: Sequence[int], logprobs: Sequence[float], version: Version, *, is_cut: bool
    ) -> Completion:
        """An answer that one version sampled. `is_cut`: it reached `max_tokens` before its end."""
        span = VersionSpan(
            start=0, end=len(ids), incarnation=version.incarnation, number=version.number
        )
        return cls(
            sampled_ids=token_ids(ids),
            logprobs=log_probs(logprobs),
            spans=(span,) if ids else (),
            finish=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """A chunk of tokens from an answer that is still being generated."""

    sampled_ids: Sequence[int]
    logprobs: Sequence[float]
    version: Version
    """Version that sampled all of these tokens."""
    kv: KvAge | None = None
    """As in `Turn`."""


ChunkCallback = Callable[[TokenChunk], None]
"""Called with the chunks of one answer, in order and without gaps, on the event loop; must not
block. The returned completion is authoritative and may contain more tokens than the chunks."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One model call as an engine gets it: token ids in, a `Completion` out."""

    prompt_ids: Sequence[int]
    sampling: SamplingSpec
    _: KW_ONLY
    policy: PolicyName
    session: str
    """Requests of one session share a growing prefix; see `rollout.routing`."""
    on_chunk: ChunkCallback | None = None
    """An engine that cannot stream never calls it."""
    given: Sequence[int] = ()
    """The first tokens of the answer: the engine continues after them, with the random numbers that
    it would have used there. The completion begins with them, with log-probs of 0. Only engines
    that are reproducible can do it, and only `runs.redrawn_answers` asks for it."""


class Generate(Protocol):
    async def __call__(self, request: GenerationRequest, /) -> Completion:
        """Generate one completion. Raises EngineError. Cancelling the call frees its slot in
        the engine."""
        ...


@runtime_checkable
class Starts(Protocol):
    """A `Generate` whose answers need no task each."""

    def start(
        self, request: GenerationRequest, lost: asyncio.Future[Completion] | None = None
    ) -> asyncio.Future[Completion]:
        """A call's completion, later; it may be lost, as a call's never is: it fails with
        EngineError or is aborted. Started again with what it was, as `lost`, it is a call that goes
        on from there."""
        ...
