# SPDX-License-Identifier: Apache-2.0
"""A partly generated answer: the tokens sampled so far, and how another engine continues them.

With a stateless sampling spec, each token depends only on the tokens before it, so another engine
continues from the prompt and the received tokens. It uses a new seed, because the lost engine may
already have used the next random numbers of the old one. Stop strings may cross the boundary, and a
grammar has state there: such an answer restarts, unless a part of it was already streamed to the
agent, which must not be contradicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.errors import EngineError
from penstock.gateway.generation import ChunkCallback, Completion, TokenChunk
from penstock.gateway.seeds import derive
from penstock.rollout.engine import SpanLog
from penstock.rollout.snapshot import Snapshot
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    Version,
    VersionSpan,
    log_probs,
    token_ids,
    view_ids,
    view_log_probs,
)


class PartialCompletion:
    def __init__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        policy: PolicyName,
        on_chunk: ChunkCallback | None,
    ) -> None:
        self._prompt_ids = prompt_ids
        self._sampling = sampling
        self._policy = policy
        self._on_chunk = on_chunk
        self._sampled: list[int] = []
        self._logprobs: list[float] = []
        self._spans: SpanLog | None = None
        self._segment_start = 0
        """Index of the first token from the current engine."""

    @property
    def num_sampled(self) -> int:
        return len(self._sampled)

    @property
    def is_stateless(self) -> bool:
        return not self._sampling.stop and not self._sampling.json_schema

    def next_request(self) -> tuple[Sequence[int], SamplingSpec]:
        """Prompt and sampling spec for the next engine."""
        self._segment_start = len(self._sampled)
        if not self._sampled:
            return self._prompt_ids, self._sampling
        rest = replace(
            self._sampling,
            max_tokens=self._sampling.max_tokens - len(self._sampled),
            seed=derive(self._sampling.seed, len(self._sampled)),
        )
        return [*self._prompt_ids, *self._sampled], rest

    def feed(self, chunk: TokenChunk) -> None:
        if not chunk.sampled_ids:
            return
        if self._spans is None:
            self._spans = SpanLog(chunk.version)
        self._spans.switch(len(self._sampled), chunk.version)
        self._sampled.extend(chunk.sampled_ids)
        self._logprobs.extend(chunk.logprobs)
        if self._on_chunk is not None:
            self._on_chunk(chunk)

    def add_aborted(self, aborted: Completion) -> None:
        """Add the tokens of an aborted answer, including those that were not streamed."""
        ids = view_ids(aborted.sampled_ids).tolist()
        logprobs = view_log_probs(aborted.logprobs).tolist()
        for span in aborted.spans:
            start = max(span.start, len(self._sampled) - self._segment_start)
            version = Version(policy=self._policy, incarnation=span.incarnation, number=span.number)
            part = slice(start, max(start, span.end))
            self.feed(TokenChunk(sampled_ids=ids[part], logprobs=logprobs[part], version=version))

    def restart(self) -> None:
        """Discard all tokens. Raises EngineError if some were already streamed to the agent."""
        if self._sampled and self._on_chunk is not None:
            raise EngineError(
                f"the engine was lost after {len(self._sampled)} streamed tokens; an answer with "
                "stop strings or a schema cannot continue on another engine; send the request again"
            )
        self._sampled.clear()
        self._logprobs.clear()
        self._spans = None

    def finish_reason(self, model: Snapshot) -> FinishReason | None:
        """Why the answer is already complete; None if it is not. An engine may die after its last
        token but before its final event."""
        if self._sampled and self._sampled[-1] in model.stop_ids:
            return FinishReason.STOP
        room = model.window - len(self._prompt_ids)
        is_full = len(self._sampled) >= min(self._sampling.max_tokens, room)
        return FinishReason.LENGTH if self._sampled and is_full else None

    def to_completion(self, finish: FinishReason) -> Completion:
        """The completion of all tokens received so far."""
        return Completion(
            sampled_ids=token_ids(self._sampled),
            logprobs=log_probs(self._logprobs),
            spans=self._spans_until(len(self._sampled)),
            finish=finish,
        )

    def append_last(self, last: Completion) -> Completion:
        """The full answer; `last` is the part from the current engine."""
        if not self._segment_start:
            return last
        at = self._segment_start
        spans = list(self._spans_until(at))
        for span in last.spans:
            moved = replace(span, start=span.start + at, end=span.end + at)
            spans[-1:] = _merged(spans[-1], moved)
        return Completion(
            sampled_ids=token_ids([*self._sampled[:at], *view_ids(last.sampled_ids)]),
            logprobs=log_probs([*self._logprobs[:at], *view_log_probs(last.logprobs)]),
            spans=tuple(spans),
            finish=last.finish,
        )

    def _spans_until(self, num_tokens: int) -> tuple[VersionSpan, ...]:
        spans = () if self._spans is None else self._spans.spans(len(self._sampled))
        return tuple(
            replace(span, end=min(span.end, num_tokens))
            for span in spans
            if span.start < num_tokens
        )


class DetachableCallback:
    """Receives the chunks of one engine; ignores them once that engine is abandoned."""

    __slots__ = ("_feed", "is_detached")

    def __init__(self, feed: Callable[[TokenChunk], None]) -> None:
        self._feed = feed
        self.is_detached = False

    def __call__(self, chunk: TokenChunk) -> None:
        if not self.is_detached:
            self._feed(chunk)


def _merged(one: VersionSpan, two: VersionSpan) -> tuple[VersionSpan, ...]:
    if (one.incarnation, one.number) == (two.incarnation, two.number):
        return (replace(one, end=two.end),)
    return one, two
