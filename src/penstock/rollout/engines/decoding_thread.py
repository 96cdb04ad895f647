# SPDX-License-Identifier: Apache-2.0
"""The thread that decodes: one lane for each policy on it, one step of each in turn.

Every turn takes requests and version swaps from the inbox. Each lane that has work admits all that
wait (one prefill), samples one token for every row, retires the rows that ended, and runs its
decoder once for the rest. A swap falls between two turns and concerns its own lane: its rows keep
their tokens and are prefilled again, and the other lanes only wait for that. Lanes have batches of
their own, because the rows of one batch have one adapter. Owns the thread, its inbox and the way
back to the event loop; imports no torch.
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

import structlog
from tokenizers import Tokenizer

from penstock.errors import EngineError, PenstockError
from penstock.gateway.generation import Completion, TokenChunk
from penstock.rollout.engines.base import CLOSED
from penstock.rollout.engines.batch import Batch, Decoder, Result, Row, Staged
from penstock.types import Version

log = structlog.get_logger(__name__)

IMPORT_LOCK = threading.Lock()
"""Engines of one pool start at once, and libraries as large as torch do not bear being imported by
several threads."""

RowChunk = tuple[Row, TokenChunk]


@dataclass(frozen=True, slots=True)
class Swap:
    staged: Staged
    version: Version
    done: Future[None]


class Lane:
    """The rows of one policy. Fields are set by the decoding thread and read by the event loop."""

    def __init__(self, max_rows: int) -> None:
        self.live: Version | None = None
        self.is_closed = False
        self.ended = threading.Event()
        self.paused_s = 0.0
        self.opened: Future[Decoder] = Future()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.tokenizer: Tokenizer | None = None
        self._max_rows = max_rows
        self._waiting: deque[Row] = deque()
        self._batch: Batch | None = None

    @property
    def has_work(self) -> bool:
        return bool(self._waiting) or (self._batch is not None and bool(self._batch.rows))

    def open(self, decoder: Decoder) -> None:
        self._batch = Batch(decoder)
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
            self.live = None  # half-swapped weights must not answer anybody
            failure = _engine_error(error, f"swap to {swap.version} failed")
            self._settle(_failed([*self._batch.drop_all(), *self._waiting], failure))
            self._waiting.clear()
            swap.done.set_exception(failure)
        else:
            self.live = swap.version
            self.paused_s = time.monotonic() - started_at
            swap.done.set_result(None)

    def run_step(self) -> None:
        chunks, results = self._step()
        self._settle(results, chunks)

    def end(self, rest: Iterable[Row] = ()) -> None:
        """Whatever is left fails, and nothing more is taken."""
        self.is_closed = True
        rows = [] if self._batch is None else self._batch.drop_all()
        self._settle(_failed([*rows, *self._waiting, *rest], EngineError(CLOSED)))
        self._waiting.clear()
        self.ended.set()

    def _step(self) -> tuple[list[RowChunk], list[Result]]:
        results: list[Result] = []
        admitted: list[Row] = []
        batch, live = self._batch, self.live
        assert batch is not None, "rows come to an open lane only"
        if live is None:
            left, self._waiting = self._waiting, deque()
            return [], _failed(left, EngineError("no version is live: the last swap failed"))
        while self._waiting and len(batch.rows) + len(admitted) < self._max_rows:
            row = self._waiting.popleft()
            refusal = batch.admit(row, live)
            if refusal is None:
                admitted.append(row)
            else:
                results.append((row, refusal))
        if not admitted and not batch.rows:
            return [], results
        streaming = [row for row in (*batch.rows, *admitted) if row.on_chunk is not None]
        try:
            results += batch.step(admitted)
        except Exception as error:
            failure = _engine_error(error, "decoding failed")
            return [], results + _failed(batch.drop_all(), failure)
        return [(row, _last(row, live)) for row in streaming], results

    def _settle(self, results: list[Result], chunks: Sequence[RowChunk] = ()) -> None:
        """Hand pieces and results to the event loop, all in one call."""
        if not (results or chunks) or self.loop is None:
            return
        try:
            self.loop.call_soon_threadsafe(_dispatch, chunks, results)
        except RuntimeError:
            log.warning("event loop ended before its answers", num_answers=len(results))


_Item = tuple[Lane, list[Row] | Swap | None]


class DecodingThread:
    """Ends with its last lane."""

    def __init__(self, open_decoder: Callable[[], Decoder], *, name: str) -> None:
        self.name = name
        self._open_decoder = open_decoder
        self._opened: Future[Decoder] = Future()
        self._inbox: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._lanes: list[Lane] = []
        # A daemon, because importing torch cannot be interrupted and must not hold up an exit.
        self._thread = threading.Thread(target=self._run, name=f"{name}-decode", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, lane: Lane) -> None:
        """While a lane is open; the first one before the start."""
        is_first = not self._lanes
        self._lanes.append(lane)

        def open_lane(opened: Future[Decoder]) -> None:
            if (error := opened.exception()) is not None:
                lane.opened.set_exception(error)
            else:
                lane.open(opened.result() if is_first else opened.result().share())

        self._opened.add_done_callback(open_lane)

    def put(self, lane: Lane, item: list[Row] | Swap | None) -> None:
        """None closes the lane."""
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
        """Everything in the inbox; blocks only while there is nothing to decode. False to end."""
        is_idle = not any(lane.has_work for lane in self._lanes)
        while is_idle or not self._inbox.empty():
            lane, item = self._inbox.get()
            if item is None:
                lane.end()
                self._lanes.remove(lane)
                if not self._lanes:
                    return False
                is_idle = not any(lane.has_work for lane in self._lanes)
            elif isinstance(item, Swap):
                lane.swap(item)
            else:
                lane.enqueue(item)
                is_idle = False
        return True

    def _fail_remaining(self) -> None:
        rest: dict[Lane, list[Row]] = {lane: [] for lane in self._lanes}
        while not self._inbox.empty():
            lane, item = self._inbox.get()
            if isinstance(item, Swap) and item.done.set_running_or_notify_cancel():
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


def closed_results(rows: Iterable[Row]) -> list[Result]:
    return _failed(rows, EngineError(CLOSED))


def _last(row: Row, version: Version) -> TokenChunk:
    return TokenChunk(sampled_ids=row.sampled[-1:], logprobs=row.logprobs[-1:], version=version)


def _dispatch(chunks: Sequence[RowChunk], results: list[Result]) -> None:
    for row, chunk in chunks:
        if row.on_chunk is None or row.future.done():
            continue
        try:
            row.on_chunk(chunk)
        except Exception as error:  # the caller's own, and not its neighbours'
            row.future.set_exception(error)
    resolve(results)


def _failed(rows: Iterable[Row], error: EngineError) -> list[Result]:
    """Each row gets an error of its own: a shared one would collect every waiter's traceback."""
    return [(row, EngineError(str(error))) for row in rows]


def _engine_error(error: Exception, what: str) -> EngineError:
    if not isinstance(error, PenstockError):
        log.error(what, exc_info=error)
    return EngineError(f"{what}: {type(error).__name__}: {error}")
