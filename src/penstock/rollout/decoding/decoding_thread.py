# SPDX-License-Identifier: Apache-2.0
"""The decoding thread: one lane per policy; the lanes take turns, one step each.

Each round takes requests and version swaps from the inbox. Each lane that has work admits the
waiting rows (one prefill), samples one token for every row, removes finished rows, and runs its
decoder once for the others. A swap runs between two rounds and affects only its lane: its rows keep
their tokens and are prefilled again. Lanes have separate batches, because all rows of a batch use
the same adapter. Owns the thread, its inbox and the callbacks into the event loop. Does not import
torch.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from penstock.errors import EngineError, PenstockError
from penstock.gateway.generation import Completion, TokenChunk
from penstock.rollout.decoding.batch import Batch, Decoder, Result, Row, Staged
from penstock.rollout.engine import CLOSED, AnswerLost
from penstock.types import FinishReason, Version

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = structlog.get_logger(__name__)

IMPORT_LOCK = threading.Lock()
"""Engines of a pool start concurrently, but libraries such as torch cannot be imported by several
threads at the same time."""

RowChunk = tuple[Row, TokenChunk]


@dataclass(frozen=True, slots=True)
class Swap:
    staged: Staged
    version: Version
    done: Future[None]


@dataclass(frozen=True, slots=True)
class Pause:
    """Stop decoding, or go on."""

    is_paused: bool
    done: Future[int]
    """How many tokens have to be computed again."""


@dataclass(slots=True, eq=False)
class Lane:
    """The rows of one policy. The decoding thread sets the fields; the event loop reads them."""

    _max_rows: int
    keeps_kv: bool = False
    """Whether rows keep their keys and values across swaps."""
    live: Version | None = None
    is_closed: bool = False
    is_paused: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    paused_s: float = 0.0
    opened: Future[Decoder] = field(default_factory=Future[Decoder])
    loop: asyncio.AbstractEventLoop | None = None
    tokenizer: Tokenizer | None = None
    _waiting: deque[Row] = field(default_factory=deque[Row])
    _batch: Batch | None = None

    @property
    def has_work(self) -> bool:
        if self.is_paused:
            return False
        return bool(self._waiting) or (self._batch is not None and bool(self._batch.rows))

    def open(self, decoder: Decoder) -> None:
        self._batch = Batch(decoder, keeps_kv=self.keeps_kv)
        self.opened.set_result(decoder)

    def enqueue(self, rows: Iterable[Row]) -> None:
        self._waiting.extend(rows)

    def swap(self, swap: Swap) -> None:
        if not swap.done.set_running_or_notify_cancel():
            return
        assert self._batch is not None
        started_at = time.monotonic()
        try:
            swap.staged.apply()
            self._batch.snapshot = swap.staged.snapshot
            self._batch.tokenizer = self.tokenizer
            self._batch.resume(swap.version)
        except Exception as error:
            self.live = None  # partly swapped weights must not be sampled from
            failure = _engine_error(error, f"swap to {swap.version} failed")
            self._settle(fail([*self._batch.drop_all(), *self._waiting], failure))
            self._waiting.clear()
            swap.done.set_exception(failure)
        else:
            self.live = swap.version
            self.paused_s = time.monotonic() - started_at
            swap.done.set_result(None)

    def pause(self, order: Pause) -> None:
        if not order.done.set_running_or_notify_cancel():
            return
        num_tokens = 0
        try:
            if self._batch is not None and order.is_paused != self.is_paused:
                num_tokens = self._batch.free_kv() if order.is_paused else 0
                if not order.is_paused and self.live is not None:
                    self._batch.resume(self.live)
        except Exception as error:
            failure = _engine_error(error, "pause failed")
            if self._batch is not None:
                self._settle(fail(self._batch.drop_all(), failure))
            order.done.set_exception(failure)
        else:
            order.done.set_result(num_tokens)
        self.is_paused = order.is_paused

    def run_step(self) -> None:
        chunks, results = self._step()
        self._settle(results, chunks)

    def end(self, rest: Iterable[Row] = ()) -> None:
        """Close the lane: fail all remaining rows and accept no more."""
        self.is_closed = True
        rows = [] if self._batch is None else self._batch.drop_all()
        self._settle(fail([*rows, *self._waiting, *rest], EngineError(CLOSED)))
        self._waiting.clear()
        self.ended.set()

    def _step(self) -> tuple[list[RowChunk], list[Result]]:
        results: list[Result] = []
        admitted: list[Row] = []
        batch, live = self._batch, self.live
        assert batch is not None, "only an open lane has rows"
        if live is None:
            left, self._waiting = self._waiting, deque()
            return [], fail(left, EngineError("no version is live, because the last swap failed"))
        while self._waiting and len(batch.rows) + len(admitted) < self._max_rows:
            row = self._waiting.popleft()
            refusal = batch.admit(row, live)
            if refusal is None:
                admitted.append(row)
            else:
                results.append((row, refusal))
        if not admitted and not batch.rows:
            return [], results
        streaming = [row for row in (*batch.rows, *admitted) if row.request.on_chunk is not None]
        try:
            results += batch.step(admitted)
        except Exception as error:
            failure = _engine_error(error, "decoding failed")
            return [], results + fail(batch.drop_all(), failure)
        return [(row, _last(row, live)) for row in streaming], results

    def _settle(self, results: list[Result], chunks: Sequence[RowChunk] = ()) -> None:
        """Pass chunks and results to the event loop in one call."""
        if not (results or chunks) or self.loop is None:
            return
        try:
            self.loop.call_soon_threadsafe(_dispatch, chunks, results)
        except RuntimeError:
            log.warning("answers dropped: event loop closed", num_answers=len(results))


_Order = list[Row] | Swap | Pause | None
_Item = tuple[Lane, _Order]


class DecodingThread:
    """Ends when its last lane closes."""

    def __init__(self, open_decoder: Callable[[], Decoder], *, name: str) -> None:
        self.name = name
        self._open_decoder = open_decoder
        self._opened: Future[Decoder] = Future()
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lanes: list[Lane] = []
        # A daemon, because importing torch cannot be interrupted and must not delay the exit.
        self._thread = threading.Thread(target=self._run, name=f"{name}-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, lane: Lane) -> None:
        """Add a lane: the first before `start()`, others while a lane is open."""
        is_first = not self._lanes
        self._lanes.append(lane)

        def open_lane(opened: Future[Decoder]) -> None:
            if (error := opened.exception()) is not None:
                lane.opened.set_exception(error)
            else:
                lane.open(opened.result() if is_first else opened.result().share())

        self._opened.add_done_callback(open_lane)

    def put(self, lane: Lane, item: _Order) -> None:
        """Send rows, a swap or a pause to a lane; None closes it."""
        self._inbox.put((lane, item))

    def _run(self) -> None:
        """consumes: requests, swaps · produces: completions, live versions
        waits for: the inbox, while no lane has a row · woken by: `put`"""
        try:
            with IMPORT_LOCK:
                decoder = self._open_decoder()
        except BaseException as error:
            self._opened.set_exception(error)
            for lane in self._lanes:
                lane.ended.set()
            return
        self._opened.set_result(decoder)
        try:
            while self._receive():
                for lane in self._lanes:
                    if lane.has_work:
                        lane.run_step()
        except Exception:
            log.exception("decoding thread died", engine=self.name)
        finally:
            self._fail_remaining()

    def _receive(self) -> bool:
        """Process the inbox; block only while there is nothing to decode. False ends the thread."""
        is_idle = not any(lane.has_work for lane in self._lanes)
        while is_idle or not self._inbox.empty():
            lane, item = self._inbox.get()
            if item is None:
                lane.end()
                self._lanes.remove(lane)
                if not self._lanes:
                    return False
                is_idle = not any(lane.has_work for lane in self._lanes)
            else:
                if isinstance(item, Swap):
                    lane.swap(item)
                elif isinstance(item, Pause):
                    lane.pause(item)
                else:
                    lane.enqueue(item)
                is_idle = is_idle and not any(lane.has_work for lane in self._lanes)
        return True

    def _fail_remaining(self) -> None:
        rest: dict[Lane, list[Row]] = {lane: [] for lane in self._lanes}
        while not self._inbox.empty():
            lane, item = self._inbox.get()
            if isinstance(item, Swap | Pause) and item.done.set_running_or_notify_cancel():
                item.done.set_exception(EngineError(CLOSED))
            elif isinstance(item, list):
                rest.setdefault(lane, []).extend(item)
        for lane, rows in rest.items():
            lane.end(rows)


def resolve(results: list[Result]) -> None:
    for row, result in results:
        if row.future.done():  # cancelled by its caller
            continue
        if isinstance(result, Completion):
            row.future.set_result(result)
        else:
            row.future.set_exception(result)


def _last(row: Row, version: Version) -> TokenChunk:
    ids, logprobs = row.sampled[-1:], row.logprobs[-1:]
    return TokenChunk(sampled_ids=ids, logprobs=logprobs, version=version, kv=row.kv)


def _dispatch(chunks: Sequence[RowChunk], results: list[Result]) -> None:
    for row, chunk in chunks:
        on_chunk = row.request.on_chunk
        if on_chunk is None or row.future.done():
            continue
        try:
            on_chunk(chunk)
        except Exception as error:  # fails only this caller's request
            row.future.set_exception(error)
    resolve(results)


def fail(rows: Iterable[Row], error: EngineError) -> list[Result]:
    """Fail each row with a separate error, because a shared one would collect all their tracebacks;
    the error has the tokens that were sampled."""
    return [(row, _failure(row, str(error))) for row in rows]


def _failure(row: Row, message: str) -> EngineError:
    if len(row.sampled) <= len(row.request.given):
        return EngineError(message)
    partial = row.spans.complete(row.sampled, row.logprobs, FinishReason.ABORT, row.kv)
    return AnswerLost(message, partial)


def _engine_error(error: Exception, what: str) -> EngineError:
    if not isinstance(error, PenstockError):
        log.error(what, exc_info=error)
    return EngineError(f"{what}: {type(error).__name__}: {error}")
