# SPDX-License-Identifier: Apache-2.0
"""Continuous batching around any decoder, in one thread of its own.

Every turn of the thread takes new requests and version swaps from the inbox, admits all that wait
(one prefill), samples one token for every row, retires the rows that ended, and runs the decoder
once for the rest. A swap falls between two such turns: rows keep their tokens and are prefilled
again under the new weights, so nothing is lost and each span says what sampled it. The tokens of
a step and the answers that it ended go to the event loop in one call for all rows. Owns the thread,
its inbox and the way back to the event loop; imports no torch.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import structlog
from tokenizers import Tokenizer

from penstock.errors import EngineError, PenstockError, boundary
from penstock.gateway.generate import Completion, Listen, Piece
from penstock.rollout.engines.base import CLOSED, SpanLog, live_for
from penstock.rollout.engines.batch import Batch, Decoder, Result, Row, Staged
from penstock.types import PolicyName, SamplingSpec, Version

log = structlog.get_logger(__name__)

_OPENING = threading.Lock()
"""Engines of one pool start at once, and libraries as large as torch do not bear being imported by
several threads."""
MAX_ROWS = 1024
"""Answers decoded together; more wait their turn."""


Told = tuple[Row, Piece]


@dataclass(frozen=True, slots=True)
class _Swap:
    staged: Staged
    version: Version
    done: Future[None]


class ContinuousEngine:
    """Requests from one event loop, decoded in one thread."""

    def __init__(
        self, open_decoder: Callable[[], Decoder], *, name: str, max_rows: int = MAX_ROWS
    ) -> None:
        self._open_decoder = open_decoder
        self._max_rows = max_rows
        self._name = name
        self._live: Version | None = None
        self._is_closed = False
        self.paused_s = 0.0
        """How long the last swap held answers up."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: list[Row] = []
        self._inbox: queue.SimpleQueue[list[Row] | _Swap | None] = queue.SimpleQueue()
        self._waiting: deque[Row] = deque()
        self._opened: Future[Decoder] = Future()
        self._load_lock = asyncio.Lock()
        self._tokenizer: Tokenizer | None = None
        # A daemon, because importing torch cannot be interrupted and must not hold up an exit.
        self._thread = threading.Thread(target=self._run, name=f"{name}-decode", daemon=True)
        self._thread.start()

    @property
    def live(self) -> Version | None:
        return None if self._is_closed else self._live

    async def __call__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        *,
        policy: PolicyName,
        session: str,
        listen: Listen | None = None,
    ) -> Completion:
        if self._is_closed:
            raise EngineError(CLOSED)
        version = live_for(policy, self._live)
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = self._loop.create_future()
        self._outbox.append(Row(prompt_ids, sampling, future, SpanLog(version), listen))
        if len(self._outbox) == 1:
            # One turn of the event loop later, so a burst of requests wakes the thread once.
            self._loop.call_soon(self._flush)
        return await future

    async def load(self, folder: Path, version: Version) -> None:
        async with self._load_lock:
            with boundary(EngineError, f"engine {self._name} opening its decoder"):
                decoder = await asyncio.shield(asyncio.wrap_future(self._opened))
            with boundary(EngineError, f"engine {self._name} loading {version} from {folder}"):
                staged = await asyncio.to_thread(self._stage, decoder, folder)
            if self._is_closed:
                raise EngineError(CLOSED)
            done: Future[None] = Future()
            self._inbox.put(_Swap(staged, version, done))
            await asyncio.wrap_future(done)

    async def close(self) -> None:
        if not self._is_closed:
            self._flush()
            self._is_closed = True
            self._inbox.put(None)
        if self._opened.done():
            await asyncio.to_thread(self._thread.join)

    def _flush(self) -> None:
        rows, self._outbox = self._outbox, []
        if self._is_closed:
            _resolve(_failed(rows, EngineError(CLOSED)))
        elif rows:
            self._inbox.put(rows)

    def _stage(self, decoder: Decoder, folder: Path) -> Staged:
        with _OPENING:
            staged = decoder.stage(folder)
        path = folder / "tokenizer.json"
        if self._tokenizer is None and path.exists():
            # Once: the vocabulary of a policy never changes, and reading a large one takes long.
            self._tokenizer = Tokenizer.from_file(str(path))
        return staged

    # --- decoding thread ------------------------------------------------------------------------

    def _run(self) -> None:
        """consumes: requests, swaps · produces: completions, live versions
        waits for: the inbox, while there is no row · woken by: `_flush`, `load`, `close`"""
        try:
            with _OPENING:
                decoder = self._open_decoder()
        except BaseException as error:
            self._opened.set_exception(error)
            return
        self._opened.set_result(decoder)
        batch = Batch(decoder)
        try:
            while self._receive(batch):
                if batch.rows or self._waiting:
                    told, results = self._step(batch)
                    self._settle(results, told)
        except Exception:
            log.exception("decoding thread died", engine=self._name)
        finally:
            self._is_closed = True
            self._refuse_rest(batch)

    def _receive(self, batch: Batch) -> bool:
        """Everything in the inbox; blocks only while there is nothing to decode. False to end."""
        is_idle = not batch.rows and not self._waiting
        while is_idle or not self._inbox.empty():
            item = self._inbox.get()
            if item is None:
                return False
            if isinstance(item, _Swap):
                self._swap(batch, item)
            else:
                self._waiting.extend(item)
                is_idle = False
        return True

    def _swap(self, batch: Batch, swap: _Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():
            return
        begun_at = time.monotonic()
        try:
            swap.staged.apply()
            batch.snapshot = swap.staged.snapshot
            batch.tokenizer = self._tokenizer
            batch.resume(swap.version)
        except Exception as error:
            self._live = None  # half-swapped weights must not answer anybody
            failure = _engine_error(error, f"swap to {swap.version} failed")
            self._settle(_failed([*batch.drop_all(), *self._waiting], failure))
            self._waiting.clear()
            swap.done.set_exception(failure)
        else:
            self._live = swap.version
            self.paused_s = time.monotonic() - begun_at
            swap.done.set_result(None)

    def _step(self, batch: Batch) -> tuple[list[Told], list[Result]]:
        results: list[Result] = []
        admitted: list[Row] = []
        assert self._live is not None, "requests are refused while nothing is live"
        while self._waiting and len(batch.rows) + len(admitted) < self._max_rows:
            row = self._waiting.popleft()
            refusal = batch.admit(row, self._live)
            if refusal is None:
                admitted.append(row)
            else:
                results.append((row, refusal))
        if not admitted and not batch.rows:
            return [], results
        heard = [row for row in (*batch.rows, *admitted) if row.listen is not None]
        try:
            results += batch.step(admitted)
        except Exception as error:
            failure = _engine_error(error, "decoding failed")
            return [], results + _failed(batch.drop_all(), failure)
        return [(row, _last(row, self._live)) for row in heard], results

    def _refuse_rest(self, batch: Batch) -> None:
        left = [*batch.drop_all(), *self._waiting]
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Swap) and item.done.set_running_or_notify_cancel():
                item.done.set_exception(EngineError(CLOSED))
            elif isinstance(item, list):
                left.extend(item)
        self._settle(_failed(left, EngineError(CLOSED)))

    def _settle(self, results: list[Result], told: Sequence[Told] = ()) -> None:
        """Hand pieces and results to the event loop, all in one call."""
        if not (results or told) or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(_hand_over, told, results)
        except RuntimeError:
            log.warning("event loop ended before its answers", num_answers=len(results))


def _last(row: Row, version: Version) -> Piece:
    return Piece(sampled_ids=row.sampled[-1:], logprobs=row.logprobs[-1:], version=version)


def _hand_over(told: Sequence[Told], results: list[Result]) -> None:
    for row, piece in told:
        if row.listen is None or row.future.done():
            continue
        try:
            row.listen(piece)
        except Exception as error:  # the caller's own, and not its neighbours'
            row.future.set_exception(error)
    _resolve(results)


def _resolve(results: list[Result]) -> None:
    for row, result in results:
        if row.future.done():  # cancelled by its caller
            continue
        if isinstance(result, Completion):
            row.future.set_result(result)
        else:
            row.future.set_exception(result)


def _failed(rows: Iterable[Row], error: EngineError) -> list[Result]:
    """Each row gets an error of its own: a shared one would collect every waiter's traceback."""
    return [(row, EngineError(str(error))) for row in rows]


def _engine_error(error: Exception, what: str) -> EngineError:
    if not isinstance(error, PenstockError):
        log.error(what, exc_info=error)
    return EngineError(f"{what}: {type(error).__name__}: {error}")
