# SPDX-License-Identifier: Apache-2.0
"""A partly generated answer: the tokens sampled so far, and how another engine continues them.

With a stateless sampling spec, each token depends only on the tokens before it, so another engine
continues from the prompt and the received tokens. It uses a new seed, because the lost engine may
already have used the next random numbers of the old one. Stop strings may cross the boundary, and a
grammar has state there: such an answer restarts, unless a part of it was already streamed to the
agent, which must not be contradicted.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import EngineError
from penstock.gateway.generation import ChunkCallback, Completion, GenerationRequest, TokenChunk
from penstock.rollout.engine import SpanLog
from penstock.rollout.snapshot import Snapshot
from penstock.seeds import derive
from penstock.types import FinishReason, KvAge, Version, VersionSpan, view_ids, view_log_probs


class PartialCompletion:
    def __init__(self, request: GenerationRequest) -> None:
        self._request = request
        self._sampling = request.sampling
        self._sampled: list[int] = []
        self._logprobs: list[float] = []
        self._spans: SpanLog | None = None
        self._segment_start = 0
        """Index of the first token from the current engine."""
        self._kv: KvAge | None = None
        """The oldest of all engines."""

    @property
    def num_sampled(self) -> int:
        return len(self._sampled)

    @property
    def is_stateless(self) -> bool:
        sampling = self._sampling
        return not (sampling.stop or sampling.json_schema or self._request.given)

    @property
    def is_streamed(self) -> bool:
        """Its caller takes its tokens one by one."""
        return self._request.on_chunk is not None

    def next_request(self, on_chunk: ChunkCallback | None) -> GenerationRequest:
        """The request for the next engine."""
        at = self._segment_start = len(self._sampled)
        if not at:
            is_same = on_chunk is None and not self.is_streamed
            return self._request if is_same else replace(self._request, on_chunk=on_chunk)
        sampling = self._sampling
        seed = derive(sampling.seed, at)
        rest = replace(sampling, max_tokens=sampling.max_tokens - at, seed=seed)
        context = [*self._request.prompt_ids, *self._sampled]
        return replace(self._request, prompt_ids=context, sampling=rest, on_chunk=on_chunk)

    def feed(self, chunk: TokenChunk) -> None:
        if not chunk.sampled_ids:
            return
        if self._spans is None:
            self._spans = SpanLog(chunk.version)
        self._spans.switch(len(self._sampled), chunk.version)
        self._sampled.extend(chunk.sampled_ids)
        self._logprobs.extend(chunk.logprobs)
        self._kv = oldest(self._kv, chunk.kv)
        if self._request.on_chunk is not None:
            self._request.on_chunk(chunk)

    def add_aborted(self, aborted: Completion) -> None:
        """Add the tokens of an aborted answer, including those that were not streamed."""
        ids = view_ids(aborted.sampled_ids).tolist()
        logprobs = view_log_probs(aborted.logprobs).tolist()
        for span in aborted.spans:
            start = max(span.start, len(self._sampled) - self._segment_start)
            part, version = slice(start, max(start, span.end)), self._version(span)
            chunk = TokenChunk(sampled_ids=ids[part], logprobs=logprobs[part], version=version)
            self.feed(replace(chunk, kv=aborted.kv))

    def restart(self) -> None:
        """Discard all tokens. Raises EngineError if some were already streamed to the agent."""
        if self._sampled and self._request.on_chunk is not None:
            raise EngineError(
                f"the engine was lost after {len(self._sampled)} streamed tokens; an answer with "
                "stop strings or a schema cannot continue on another engine; send the request again"
            )
        self._sampled.clear()
        self._logprobs.clear()
        self._spans = self._kv = None

    def completion(self, model: Snapshot) -> Completion | None:
        """The answer if it is already complete: an engine may die after its last token but before
        its final event."""
        room = model.window - len(self._request.prompt_ids)
        if self._spans is None or self._request.given:
            return None
        if self._sampled[-1] in model.stop_ids:
            return self._spans.complete(self._sampled, self._logprobs, FinishReason.STOP, self._kv)
        if len(self._sampled) >= min(self._sampling.max_tokens, room):
            return self._spans.complete(
                self._sampled, self._logprobs, FinishReason.LENGTH, self._kv
            )
        return None

    def append_last(self, last: Completion) -> Completion:
        """The full answer; `last` is the part from the current engine."""
        at = self._segment_start
        if not at:
            return last
        assert self._spans is not None
        self._spans.truncate(at)
        for span in last.spans:
            self._spans.switch(at + span.start, self._version(span))
        ids = [*self._sampled[:at], *view_ids(last.sampled_ids)]
        logprobs = [*self._logprobs[:at], *view_log_probs(last.logprobs)]
        kv = oldest(self._kv, last.kv)
        return self._spans.complete(ids, logprobs, last.finish, kv, last.experts)

    def _version(self, span: VersionSpan) -> Version:
        policy = self._request.policy
        return Version(policy=policy, incarnation=span.incarnation, number=span.number)


def oldest(first: KvAge | None, second: KvAge | None) -> KvAge | None:
    return min((age for age in (first, second) if age is not None), default=None)
