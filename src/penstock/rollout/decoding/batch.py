# SPDX-License-Identifier: Apache-2.0
"""The rows that are decoded together: admission, one sampling step for all, removal, resumption.

Owns spans and stop conditions. Independent of threads, queues and models: a decoder turns contexts
into logits.

After each token, the decoded tail of the answer is searched for stop strings. The tokens of a stop
string stay in the answer: they were sampled, so they are trained. The gateway hides them from the
agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.decoding.sampling import SpecColumns, sample
from penstock.rollout.engine import SpanLog
from penstock.rollout.snapshot import Snapshot, prompt_problem
from penstock.types import NO_CHOICE, ExpertChoices, FinishReason, KvAge, Version

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Staged:
    """Weights in memory, checked and ready to replace the live ones."""

    snapshot: Snapshot
    apply: Callable[[], None]
    """Makes them live; called by the decoding thread between steps."""
    verify: Callable[[int], str | None] | None = None
    """Of a patch: compares loaded tensors with their digests after the n-th patch in a row; returns
    what is wrong. Called after the swap, from any thread."""


class Decoder(Protocol):
    """A model with the cached state of its rows, in order. Other threads call only `stage`."""

    def stage(self, folder: Path, patch: Path | None = None) -> Staged:
        """Read and check the weights; raises EngineError without changes if they do not fit. With
        a patch from the live weights, only what changed is read."""
        ...

    def join(self, contexts: Sequence[Sequence[int]]) -> Logits:
        """Append one row per context; return the next-token logits of each."""
        ...

    def advance(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> Logits:
        """Keep only `rows` and append a token to each; return the next-token logits."""
        ...

    def repeat_last(self, tokens: NDArray[np.int64]) -> Logits:
        """Decode the last token of each row again, under new weights; the keys and values of the
        tokens before it stay."""
        ...

    def clear(self) -> None: ...

    def experts(self, row: int) -> ExpertChoices | None:
        """Chosen for the tokens of a row so far, if they are recorded."""
        ...

    def share(self) -> Decoder:
        """A decoder with separate rows, for another policy's adapters on the same weights."""
        ...


@dataclass(slots=True)
class Row:
    request: GenerationRequest
    """The engine calls its `on_chunk` in the caller's event loop."""
    future: asyncio.Future[Completion]
    """Read here only to detect cancellation; the engine resolves it in the caller's event loop."""
    spans: SpanLog
    limit: int = 0
    """Most tokens of the answer; set on admission."""
    sampled: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    kv: KvAge | None = None
    """The version that computed its first keys and values, if they are kept across swaps."""


Result = tuple[Row, Completion | EngineError]


class Batch:
    def __init__(self, decoder: Decoder, *, keeps_kv: bool = False) -> None:
        """keeps_kv: keep the keys and values of the rows across swaps."""
        self._keeps_kv = keeps_kv
        self.rows: list[Row] = []
        self.snapshot: Snapshot | None = None
        self.tokenizer: Tokenizer | None = None
        self._decoder = decoder
        self._specs = SpecColumns.of(())
        self._checked: tuple[Sequence[int], Snapshot] | None = None
        """The last prompt without a problem, and the snapshot that it was checked for."""
        self._logits: Logits | None = None
        """Next-token logits of each row."""
        self._is_freed = False
        """The keys and values of all rows are gone."""

    def admit(self, row: Row, version: Version) -> RequestRejected | None:
        """Prepare a row for `step`, or return why it cannot be decoded."""
        assert self.snapshot is not None
        prompt_ids, sampling = row.request.prompt_ids, row.request.sampling
        if (why := self._problem(prompt_ids, row.request.given)) is not None:
            return RequestRejected(why)
        if sampling.stop and self.tokenizer is None:
            return RequestRejected("stop strings need tokenizer.json, which the snapshot lacks")
        if sampling.json_schema:
            return RequestRejected(
                "this engine does not support JSON schemas; set engine: vllm, or remove the schema"
            )
        row.limit = min(sampling.max_tokens, self.snapshot.window - len(prompt_ids))
        row.sampled, row.logprobs = list(row.request.given), [0.0] * len(row.request.given)
        row.spans.switch(0, version)
        row.kv = (version.incarnation, version.number) if self._keeps_kv else None
        return None

    def _problem(self, prompt_ids: Sequence[int], given: Sequence[int]) -> str | None:
        """Why the model cannot answer; members of a group ask with the same prompt in a row."""
        assert self.snapshot is not None
        if given:
            return prompt_problem([*prompt_ids, *given], self.snapshot)
        if self._checked != (prompt_ids, self.snapshot):
            why = prompt_problem(prompt_ids, self.snapshot)
            if why is not None:
                return why
            self._checked = (prompt_ids, self.snapshot)
        return None

    def step(self, admitted: list[Row]) -> list[Result]:
        """Prefill new rows, sample a token for every row, decode once for unfinished rows."""
        self._join(admitted)
        assert self._logits is not None
        position = np.array([len(row.sampled) for row in self.rows], np.int64)
        tokens, logprobs = sample(self._logits, self._specs, position)
        finished: list[Result] = []
        kept: list[int] = []
        columns = zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True)
        for index, (row, token, logprob) in enumerate(columns):
            row.sampled.append(token)
            row.logprobs.append(logprob)
            finish = self._finish(row, token)
            if finish is not None:
                finished.append((row, self._complete(index, row, finish)))
            elif not row.future.cancelled():
                kept.append(index)
        self._keep(kept, tokens)
        return finished

    def _complete(self, index: int, row: Row, finish: FinishReason) -> Completion:
        """The last token was sampled and not computed, so it has no experts."""
        experts = self._decoder.experts(index)
        if experts is not None:
            rest = NO_CHOICE * experts.token_bytes
            experts = replace(experts, choices=experts.choices + rest)
        return row.spans.complete(row.sampled, row.logprobs, finish, row.kv, experts)

    def free_kv(self) -> int:
        """Drop the keys and values of all rows until `resume`; how many tokens that affects."""
        self._decoder.clear()
        self._logits = None
        self._is_freed = True
        return sum(len(_context(row)) for row in self.rows)

    def resume(self, version: Version) -> None:
        """After a swap or a pause: prefill all rows again from their tokens, or only their last
        token."""
        contexts = [_context(row) for row in self.rows]
        is_freed, self._is_freed = self._is_freed, False
        if contexts and self._keeps_kv and not is_freed:
            last = np.array([ids[-1] for ids in contexts], np.int64)
            self._logits = self._decoder.repeat_last(last)
        else:
            self._decoder.clear()
            self._logits = self._decoder.join(contexts) if contexts else None
        for row in self.rows:
            row.spans.switch(len(row.sampled), version)

    def drop_all(self) -> list[Row]:
        """Remove and return all rows."""
        rows, self.rows = self.rows, []
        self._specs = SpecColumns.of(())
        self._logits = None
        self._decoder.clear()
        return rows

    def _join(self, rows: list[Row]) -> None:
        if not rows:
            return
        self.rows.extend(rows)
        logits = self._decoder.join([_context(row) for row in rows])
        self._specs = self._specs.join(SpecColumns.of([row.request.sampling for row in rows]))
        self._logits = logits if self._logits is None else np.concatenate((self._logits, logits))

    def _keep(self, kept: list[int], tokens: NDArray[np.int64]) -> None:
        if not kept:
            self.drop_all()
            return
        index = np.array(kept, np.int64)
        if len(kept) < len(self.rows):
            self.rows = [self.rows[i] for i in kept]
            self._specs = self._specs.take(index)
        self._logits = self._decoder.advance(index, tokens[index])

    def _finish(self, row: Row, token: int) -> FinishReason | None:
        assert self.snapshot is not None
        if token in self.snapshot.stop_ids:
            return FinishReason.STOP
        if self._has_stop_string(row):
            return FinishReason.STOP
        return FinishReason.LENGTH if len(row.sampled) >= row.limit else None

    def _has_stop_string(self, row: Row) -> bool:
        stops = row.request.sampling.stop
        if not stops:
            return False
        assert self.tokenizer is not None
        # A character is at most four tokens, so this tail contains any stop string that just ended.
        tail = 4 * max(map(len, stops)) + 8
        text = self.tokenizer.decode(row.sampled[-tail:], skip_special_tokens=True)
        return any(stop in text for stop in stops)


def _context(row: Row) -> Sequence[int]:
    return [*row.request.prompt_ids, *row.sampled] if row.sampled else row.request.prompt_ids
