# SPDX-License-Identifier: Apache-2.0
"""Takes requests, lets each take effect once and in order, and keeps every result.

    accepted      row of the request, durable          before it is answered with a future
    applied       the model in memory changed          in the order of the model's numbers
    finished      row of the result, durable           before anybody gets it

A model's state is written every few requests, in one transaction with the result of the last one in
it. After a crash, the model is that state plus the finished requests after it, computed again: the
same requests give the same bits. A request without a result has left no trace, and is applied then.

Owns order, replay and results. Knows no HTTP, and not what a request does.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog
import torch

from penstock.errors import (
    BadRequest,
    ConfigError,
    Forbidden,
    NotFound,
    RequestRejected,
    StoreError,
)
from penstock.gateway.fair_queue import FairQueue
from penstock.redaction import excerpt
from penstock.tinker.effects import CHECKPOINTS, REPLAYED, Effects
from penstock.tinker.journal import (
    ROW_BYTES,
    Change,
    Journal,
    Kind,
    Request,
    Result,
    State,
    digest_of,
)
from penstock.tinker.lanes import Lane, ModelConfig
from penstock.tinker.limits import Limits
from penstock.tinker.models import BaseModel
from penstock.tinker.protocol import PROTOBUF, CreateModel, LoadWeights
from penstock.tinker.samplers import Samplers
from penstock.tinker.sampling import Sampling
from penstock.wire.codec import JSON, decode, encode_json

log = structlog.get_logger(__name__)
T = TypeVar("T")
MAX_TRIES = 5
"""Of a request during which server after server ends: a pass may take more memory than there is,
and all other models would wait for it."""
GIVEN_UP = (
    f"the server ended {MAX_TRIES} times while it computed this request, maybe for lack of memory; "
    "the request has changed nothing. Send less at a time"
)
USER_ERRORS = (BadRequest, RequestRejected, ConfigError, Forbidden, NotFound)


class TinkerService:
    def __init__(
        self,
        folder: Path,
        base: BaseModel,
        samplers: Samplers,
        *,
        model_name: str,
        threads: int = 1,
        snapshot_every: int = 16,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """snapshot_every: requests that change a model between two of its states on disk."""
        self.model_name = model_name
        self.base = base
        self.limits = limits or Limits()
        self.journal = Journal(folder)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set to an exception when the journal cannot be written: the server must end."""
        self.folder = folder
        self.effects = Effects(
            folder, self.journal, base, model_name=model_name, limits=self.limits, clock=clock
        )
        self.sampling = Sampling(folder, self.journal, base, samplers, self._in_turn)
        self._snapshot_every = snapshot_every
        self._clock = clock
        self._lanes: dict[str, Lane] = {}
        self._num_waiting: Counter[str] = Counter()
        self._waiting: set[str] = set()
        self._survivors: set[str] = set()
        """Requests that an earlier server accepted; it may have ended with one of them."""
        self._waiters: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(
            1, "tinker-models", initializer=torch.set_num_threads, initargs=(threads,)
        )
        """One for all models: their passes take turns."""
        self._passes = FairQueue(1)
        """And so do their owners, however many passes each waits for."""

    async def start(self) -> None:
        """Take up what was accepted and has no result."""
        for request in self.journal.waiting():
            self._survivors.add(request.id)
            self._enqueue(request)
            lane = self._lanes.get(request.lane)
            if lane is not None and not lane.asked_rank:
                lane.asked_rank = self._rank_of_accepted(request)

    async def close(self) -> None:
        tasks = [*self._tasks, *(lane.task for lane in self._lanes.values() if lane.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=True)
        await self.sampling.close()
        await self.journal.close()

    # --- requests --------------------

    async def submit(self, request: Request, body: bytes) -> None:
        """Durable when this returns. The same request again is the same future; another one of its
        number is refused."""
        if request.id in self._waiting:
            await self.journal.write()  # after the same request, which is being written
        if self._is_known(request, body):
            return
        self.limits.check_waiting(self._num_waiting[request.owner])
        lane = None if request.kind is Kind.SAMPLE else self._check_lane(request, body)
        stored = self.effects.stored
        with self._arriving(request.owner, lane):
            if not stored.has_room(request.owner, len(body)):
                await asyncio.to_thread(stored.require, request.owner, len(body))
            is_new = request.id not in self._waiting
            if is_new:
                await self._accept(request, body)
        if not is_new:  # the same request came meanwhile
            await self.submit(request, body)

    @contextmanager
    def _arriving(self, owner: str, lane: Lane | None) -> Generator[None]:
        """Counted before anything is awaited: many arrive meanwhile."""
        self._num_waiting[owner] += 1
        if lane is not None:
            lane.num_arriving += 1
        try:
            yield
        finally:
            self._num_waiting[owner] -= 1
            if lane is not None:
                lane.num_arriving -= 1
                self._forget_unused(lane)

    async def _accept(self, request: Request, body: bytes) -> None:
        self.effects.stored.add(request.owner, len(body))
        self._waiting.add(request.id)
        try:
            await self.journal.write(self.journal.accepted(request, body, self._clock()))
        except BaseException:
            self._waiting.discard(request.id)
            raise
        self._enqueue(request)

    async def keep_row(self, owner: str, row: Change) -> None:
        """Of a session; it counts in what its owner keeps. Raises Forbidden."""
        stored = self.effects.stored
        await asyncio.to_thread(stored.require, owner, ROW_BYTES)
        stored.add(owner, ROW_BYTES)
        await self.journal.write(row)

    def _is_known(self, request: Request, body: bytes) -> bool:
        known = self.journal.owner_and_digest(request.id)
        if known is None:
            return False
        if known != (request.owner, digest_of(body)):
            raise BadRequest(
                f"request {request.id} was accepted before with another content; number requests "
                "of a model, or of a sampling session, without repeating one"
            )
        return True

    def _check_lane(self, request: Request, body: bytes) -> Lane:
        """The lane in which it may wait; made only now."""
        rank = self._rank(request, body)
        lane = self._lanes.get(request.lane)
        next_number = self.journal.next_number(request.lane) if lane is None else lane.next
        if request.number < next_number:
            raise BadRequest(
                f"request {request.number} of {request.lane} has taken effect, and its result is "
                "no longer kept"
            )
        if lane is None or not lane.is_in_use or rank > lane.rank:
            others = self._ranks_in_use(request.owner, but=request.lane)
            self.limits.check_models(others, rank)
            lane = self._lane(request.lane, request.owner)
            lane.asked_rank = rank
        return lane

    def _rank(self, request: Request, body: bytes) -> int:
        """Of the request's model. Raises NotFound, and BadRequest for weights that are not there
        yet: when its turn comes they may be, of any rank."""
        if request.number == 0 and request.kind is Kind.CREATE:
            return decode(body, CreateModel, media_type=JSON).lora.rank
        if request.number == 0 and request.kind is Kind.LOAD:
            path = decode(body, LoadWeights, media_type=JSON).path
            return self.effects.checkpoint(path, request.owner)[1].rank
        return self.model_config(request.lane, request.owner).rank

    def _rank_of_accepted(self, request: Request) -> int:
        """As it was counted before the restart, or more."""
        try:
            return self._rank(request, b"" if request.number else self.journal.body(request))
        except NotFound:  # which is its result
            return 0
        except BadRequest:  # the weights are gone; others may be saved under their name
            return self.limits.max_rank

    def _ranks_in_use(self, owner: str, *, but: str) -> list[int]:
        """Of each model other than `but`; those that were idle for long are put aside."""
        now = time.monotonic()
        for lane in [*self._lanes.values()]:
            if lane.is_idle and now - lane.used_at > self.limits.idle_s:
                lane.model = None  # its journal has everything
                self._forget_unused(lane)
        mine = (lane for lane in self._lanes.values() if lane.owner == owner and lane.id != but)
        return [lane.rank for lane in mine if lane.is_in_use]

    def _forget_unused(self, lane: Lane) -> None:
        if not lane.is_in_use and self._lanes.get(lane.id) is lane:
            del self._lanes[lane.id]

    def model_config(self, id: str, owner: str) -> ModelConfig:
        """Raises NotFound."""
        query = "SELECT owner, config FROM models WHERE id = :id"
        found = self.journal.rows(query, id=id)
        if not found or found[0][0] != owner:
            raise NotFound(f"no model {id} of this credential")
        return msgspec.json.decode(found[0][1], type=ModelConfig)

    def _lane(self, id: str, owner: str) -> Lane:
        lane = self._lanes.get(id)
        if lane is None:
            next_number = self.journal.next_number(id)
            lane = self._lanes[id] = Lane(id=id, owner=owner, next=next_number)
        return lane

    def _enqueue(self, request: Request) -> None:
        self._waiting.add(request.id)
        self._num_waiting[request.owner] += 1
        if request.kind is Kind.SAMPLE:
            task = asyncio.create_task(self._sample(request))
            self._tasks.add(task)
            task.add_done_callback(self._on_sampled)
            return
        lane = self._lane(request.lane, request.owner)
        lane.waiting[request.number] = request
        if lane.is_idle and lane.next in lane.waiting:
            lane.task = asyncio.create_task(self._run_lane(lane))
            lane.task.add_done_callback(self._on_end)

    def _on_sampled(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._on_end(task)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)

    async def await_result(self, id: str, owner: str, wait_s: float) -> int | None:
        """Its bytes, or None if there is no result after this time; raises NotFound."""
        num_bytes = self.journal.result_bytes(id, owner)
        if num_bytes is not None or id not in self._waiting:
            return num_bytes
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[id].append(done)
        try:
            await asyncio.wait_for(done, timeout=wait_s)
        except TimeoutError:
            pass
        finally:
            if id in self._waiters and done in self._waiters[id]:
                self._waiters[id].remove(done)
        return self.journal.result_bytes(id, owner)

    async def result(self, id: str) -> Result:
        """One that `await_result` has found. In a thread: it may be large, or come after a large
        request in its row."""
        return await asyncio.to_thread(self.journal.result, id)

    def _settle(self, request: Request) -> None:
        self._waiting.discard(request.id)
        self._survivors.discard(request.id)
        self._num_waiting[request.owner] -= 1
        for done in self._waiters.pop(request.id, ()):
            if not done.done():
                done.set_result(None)

    async def _finish(
        self, request: Request, result: Result, changes: Sequence[Change] = ()
    ) -> None:
        keeps = result.state is State.DONE and request.kind in REPLAYED
        finished = self.journal.finished(request, result, self._clock(), keeps_body=keeps)
        await self.journal.write(*changes, finished)
        self.effects.stored.add(request.owner, len(result.content))
        self._settle(request)

    # --- models --------------------

    async def _run_lane(self, lane: Lane) -> None:
        while (request := lane.waiting.get(lane.next)) is not None:
            lane.used_at = time.monotonic()
            async with self._passes.place(lane.owner):
                result, changes = await self._try(lane, request)
            await self._finish(request, result, changes)
            del lane.waiting[request.number]
            lane.next += 1
            self.effects.delete_old_states(lane)
        self._forget_unused(lane)

    async def _try(self, lane: Lane, request: Request) -> tuple[Result, list[Change]]:
        """Each try of a survivor is durable before it begins."""
        if request.id in self._survivors:
            if self.journal.num_tries(request) >= MAX_TRIES:
                log.warning("request given up", request=request.id, kind=request.kind)
                return _failure(BadRequest(GIVEN_UP), "user"), []
            await self.journal.write(self.journal.tried(request))
        return await self._run(partial(self._apply_one, lane, request))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _in_turn(self, owner: str, work: Callable[[], T]) -> T:
        async with self._passes.place(owner):
            return await self._run(work)

    def _apply_one(self, lane: Lane, request: Request) -> tuple[Result, list[Change]]:
        """In the models' thread."""
        try:
            if lane.model is None and request.number > 0:
                self.effects.load(lane)
            effect = self.effects.apply(lane, request)
            changes = effect.changes
            if request.kind in REPLAYED:
                lane.num_since_snapshot += 1
            if effect.needs_snapshot or lane.num_since_snapshot >= self._snapshot_every:
                changes += self.effects.snapshot(lane, request.number)
        except USER_ERRORS as error:
            return _failure(error, "user"), []
        except StoreError:
            raise
        except Exception as error:
            log.exception("request failed", request=request.id, kind=request.kind)
            lane.model = None  # what it left in memory is unknown; the journal is not
            return _failure(error, "server"), []
        is_binary = isinstance(effect.content, bytes)
        content = effect.content if is_binary else encode_json(effect.content)
        media_type = PROTOBUF if is_binary else JSON
        return Result(state=State.DONE, content=content, media_type=media_type), changes

    # --- sampling --------------------

    async def _sample(self, request: Request) -> None:
        try:
            content = await self.sampling.answer(request)
            result = Result(state=State.DONE, content=content, media_type=PROTOBUF)
        except USER_ERRORS as error:
            result = _failure(error, "user")
        except StoreError:
            raise
        except Exception as error:
            log.exception("sampling failed", request=request.id)
            result = _failure(error, "server")
        await self._finish(request, result)

    # --- housekeeping --------------------

    async def prune(self) -> None:
        """Delete results and weights whose time is over."""
        now = self._clock()
        ended = self.journal.rows(
            "SELECT path, folder FROM checkpoints WHERE ends_at < :now", now=now
        )
        for path, folder in ended:
            await self.journal.write(
                Change("DELETE FROM checkpoints WHERE path = :path", {"path": path})
            )
            await asyncio.to_thread(shutil.rmtree, self.folder / folder, ignore_errors=True)
        used = {name for (name,) in self.journal.rows("SELECT folder FROM checkpoints")}
        for folder in (self.folder / CHECKPOINTS).iterdir():
            try:
                is_old = folder.stat().st_mtime < now - self.limits.keep_s
            except FileNotFoundError:  # it was new, and has its name now
                continue
            if is_old and self.effects.relative(folder) not in used:  # it was overwritten
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        await self.journal.write(self.journal.outdated(now - self.limits.keep_s))


def _failure(error: Exception, category: str) -> Result:
    """As the SDK reads it; of errors of this server, only the kind."""
    is_users = isinstance(error, USER_ERRORS)
    text = str(error) if is_users else f"{type(error).__name__}; the server's log says more"
    content = encode_json({"error": excerpt(text), "category": category})
    return Result(state=State.FAILED, content=content, media_type=JSON)
