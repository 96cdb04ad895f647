# SPDX-License-Identifier: Apache-2.0
"""Takes requests, lets each take effect once and in order, and keeps every result.

    accepted      row of the request, durable          before it is answered with a future
    applied       the model in memory changed          in the order of the model's numbers
    finished      row of the result, durable           before anybody gets it

A model's state is written every few requests, in one transaction with the result of the last one in
it. After a crash, the model is that state plus the finished requests after it, computed again: the
same requests give the same bits. A request without a result has left no trace, and is applied then.

Owns order, replay, results and limits of each credential. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import structlog
import torch
from safetensors.torch import load_file

from penstock.config import LoraConfig
from penstock.durable import write_durably
from penstock.errors import (
    BadRequest,
    Busy,
    ConfigError,
    Forbidden,
    NotFound,
    RequestRejected,
    StoreError,
)
from penstock.redaction import hide_secrets
from penstock.tinker.journal import Change, Journal, Kind, Request, Result, State, digest_of
from penstock.tinker.losses import read_loss
from penstock.tinker.models import AdaptedModel, BaseModel, TrainedModel
from penstock.tinker.protocol import (
    PROTOBUF,
    CreateModel,
    LoadWeights,
    Lora,
    OptimStep,
    Sample,
    SaveWeights,
    read_forward_backward,
    write_outputs,
    write_samples,
)
from penstock.tinker.samplers import Samplers, prompt_ids
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.wire.codec import JSON, decode, encode_json

log = structlog.get_logger(__name__)
T = TypeVar("T")
REPLAYED = (Kind.CREATE, Kind.LOAD, Kind.FORWARD_BACKWARD, Kind.OPTIM)
"""What changes a model; all else is not computed again."""
USER_ERRORS = (BadRequest, RequestRejected, ConfigError, NotFound)
NO_SNAPSHOT = -1
CHECKPOINTS, MODELS, STATES = "checkpoints", "models", "states"
STATE = "state.bin"
"""Of saved weights: optimizer and all. Not `*.safetensors`, which engines would read as weights."""
MAX_SAMPLING = 256
"""Sampling requests at a time; the others wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one credential's subject."""

    max_models: int = 8
    """Models in memory; one that was idle for `idle_s` is not."""
    max_waiting: int = 4096
    """Requests without a result."""
    max_stored_bytes: int = 64 << 30
    """Of saved weights."""
    idle_s: float = 1800.0
    keep_s: float = 7 * 86_400.0
    """How long results, and weights of sampling clients, are kept."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model's adapter, and of saved weights."""

    rank: int
    targets: tuple[str, ...]
    folder: str
    """Of the adapter as it began, relative to the server's folder."""

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(rank=self.rank, targets=self.targets)


@dataclass(slots=True)
class _Lane:
    """One model's requests."""

    id: str
    owner: str
    next: int
    waiting: dict[int, Request] = field(default_factory=dict[int, Request])
    model: TrainedModel | None = None
    config: ModelConfig | None = None
    num_since_snapshot: int = 0
    task: asyncio.Task[None] | None = None
    used_at: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        return self.task is None or self.task.done()

    @property
    def is_in_use(self) -> bool:
        return self.model is not None or bool(self.waiting)


@dataclass(slots=True)
class _Effect:
    """What a request did, besides its change to the model."""

    content: Any
    """A record for JSON, or bytes of protobuf."""
    changes: list[Change] = field(default_factory=list[Change])
    needs_snapshot: bool = False


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
        self._samplers = samplers
        self._snapshot_every = snapshot_every
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._num_waiting: Counter[str] = Counter()
        self._waiting: set[str] = set()
        self._waiters: defaultdict[str, list[asyncio.Future[None]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sampling = asyncio.Semaphore(MAX_SAMPLING)
        self._scorers: dict[str, AdaptedModel] = {}
        for name in (CHECKPOINTS, MODELS, STATES):
            (folder / name).mkdir(exist_ok=True)
        self._thread = ThreadPoolExecutor(
            1, "tinker-models", initializer=torch.set_num_threads, initargs=(threads,)
        )
        """One for all models: their passes take turns."""

    async def start(self) -> None:
        """Take up what was accepted and has no result."""
        for request in self.journal.waiting():
            self._enqueue(request)

    async def close(self) -> None:
        tasks = [*self._tasks, *(lane.task for lane in self._lanes.values() if lane.task)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown(wait=True)
        await self._samplers.close()
        self.journal.close()

    # --- requests --------------------

    async def submit(self, request: Request, body: bytes) -> None:
        """Durable when this returns. The same request again is the same future; another one of its
        number is refused."""
        if request.id in self._waiting:
            await self.journal.write()  # after the same request, which is being written
        if self._is_known(request, body):
            return
        if self._num_waiting[request.owner] >= self.limits.max_waiting:
            raise Busy(
                f"{self.limits.max_waiting} requests of this credential wait; retrieve their "
                "results first",
                retry_after_s=1.0,
            )
        if request.kind is not Kind.SAMPLE:
            self._check_lane(request)
        # Counted first: many arrive while one is written.
        self._waiting.add(request.id)
        self._num_waiting[request.owner] += 1
        try:
            await self.journal.write(self.journal.accepted(request, body, self._clock()))
        except BaseException:
            self._settle(request)
            raise
        self._enqueue(request, is_counted=True)

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

    def _check_lane(self, request: Request) -> None:
        if request.number > 0:
            self.model_config(request.lane, request.owner)
        lane = self._lane(request.lane, request.owner)
        if request.number < lane.next:
            raise BadRequest(
                f"request {request.number} of {request.lane} has taken effect, and its result is "
                "no longer kept"
            )
        if not lane.is_in_use and self._num_models(request.owner) >= self.limits.max_models:
            raise Forbidden(
                f"this credential has {self.limits.max_models} models in use, its limit; one that "
                f"is idle for {self.limits.idle_s:.0f} s counts no longer"
            )

    def _num_models(self, owner: str) -> int:
        """In use; those that were idle for long are put aside."""
        now = time.monotonic()
        for lane in self._lanes.values():
            if lane.is_idle and now - lane.used_at > self.limits.idle_s:
                lane.model = None  # its journal has everything
        return sum(lane.owner == owner and lane.is_in_use for lane in self._lanes.values())

    def model_config(self, id: str, owner: str) -> ModelConfig:
        """Raises NotFound."""
        query = "SELECT owner, config FROM models WHERE id = :id"
        found = self.journal.rows(query, id=id)
        if not found or found[0][0] != owner:
            raise NotFound(f"no model {id} of this credential")
        return msgspec.json.decode(found[0][1], type=ModelConfig)

    def _lane(self, id: str, owner: str) -> _Lane:
        lane = self._lanes.get(id)
        if lane is None:
            next_number = self.journal.next_number(id)
            lane = self._lanes[id] = _Lane(id=id, owner=owner, next=next_number)
        return lane

    def _enqueue(self, request: Request, *, is_counted: bool = False) -> None:
        if not is_counted:
            if request.id in self._waiting:
                return
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

    async def retrieve(self, id: str, owner: str, wait_s: float) -> Result | None:
        """None if there is no result after this time; raises NotFound."""
        known = self.journal.owner_and_digest(id)
        if known is None or known[0] != owner:
            raise NotFound(f"no request {id} of this credential")
        result = self.journal.result(id)
        if result is not None or id not in self._waiting:
            return result
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[id].append(done)
        try:
            await asyncio.wait_for(done, timeout=wait_s)
        except TimeoutError:
            pass
        finally:
            if id in self._waiters and done in self._waiters[id]:
                self._waiters[id].remove(done)
        return self.journal.result(id)

    def _settle(self, request: Request) -> None:
        self._waiting.discard(request.id)
        self._num_waiting[request.owner] -= 1
        for done in self._waiters.pop(request.id, ()):
            if not done.done():
                done.set_result(None)

    async def _finish(
        self, request: Request, result: Result, changes: Sequence[Change] = ()
    ) -> None:
        await self.journal.write(*changes, self.journal.finished(request, result, self._clock()))
        self._settle(request)

    # --- models --------------------

    async def _run_lane(self, lane: _Lane) -> None:
        while (request := lane.waiting.get(lane.next)) is not None:
            lane.used_at = time.monotonic()
            result, changes = await self._in_thread(partial(self._apply_one, lane, request))
            await self._finish(request, result, changes)
            del lane.waiting[request.number]
            lane.next += 1
            self._delete_old_states(lane)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _apply_one(self, lane: _Lane, request: Request) -> tuple[Result, list[Change]]:
        """In the models' thread."""
        try:
            if lane.model is None and request.number > 0:
                self._load(lane)
            effect = self._apply(lane, request)
            changes = effect.changes
            if request.kind in REPLAYED:
                lane.num_since_snapshot += 1
            if effect.needs_snapshot or lane.num_since_snapshot >= self._snapshot_every:
                changes += self._snapshot(lane, request.number)
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

    def _load(self, lane: _Lane) -> None:
        """The model as all finished requests have left it."""
        query = "SELECT config, snapshot, digest FROM models WHERE id = :id"
        found = self.journal.rows(query, id=lane.id)
        if not found:
            raise NotFound(f"there is no model {lane.id}; its creation failed")
        config, number, digest = found[0]
        lane.config = msgspec.json.decode(config, type=ModelConfig)
        model = self._new_model(lane.config)
        if number != NO_SNAPSHOT:
            model.restore(self._read_state(self._state_file(lane, number), digest))
        lane.model, lane.num_since_snapshot = model, 0
        for request in self.journal.done_after(lane.id, number):
            if request.kind in REPLAYED and request.kind is not Kind.CREATE:
                self._apply(lane, request)
                lane.num_since_snapshot += 1

    def _new_model(self, config: ModelConfig) -> TrainedModel:
        return TrainedModel(self.base, self.folder / config.folder, config.lora)

    def _apply(self, lane: _Lane, request: Request) -> _Effect:
        body = self.journal.body(request)
        if request.kind is Kind.CREATE:
            return self._create(lane, decode(body, CreateModel, media_type=JSON))
        if request.kind is Kind.LOAD:
            return self._load_weights(lane, request, decode(body, LoadWeights, media_type=JSON))
        model = lane.model
        assert model is not None
        match request.kind:
            case Kind.FORWARD | Kind.FORWARD_BACKWARD:
                asked = read_forward_backward(body)
                loss = read_loss(asked.loss, asked.settings)
                passed = model.run(asked.data, loss, is_trained=not asked.is_forward_only)
                return _Effect(write_outputs(passed.logprobs, passed.metrics))
            case Kind.OPTIM:
                step = decode(body, OptimStep, media_type=JSON)
                return _Effect({"metrics": model.optim_step(step.adam_params)})
            case _:
                saved = decode(body, SaveWeights, media_type=JSON)
                return self._save(lane, model, request, saved)

    def _create(self, lane: _Lane, body: CreateModel) -> _Effect:
        if body.base_model != self.model_name:
            raise BadRequest(
                f"no model {body.base_model!r} here; this server has {self.model_name!r}"
            )
        if body.optimizer_config.type != "adamw":
            raise BadRequest(f"no optimizer {body.optimizer_config.type!r} here; there is adamw")
        lora = body.lora_config or Lora(rank=32)
        config = self.base.lora_config(lora)
        seed = int(digest_of(lane.id.encode())[:15], 16) if lora.seed is None else lora.seed
        folder = self.folder / MODELS / _name(lane.id)
        self.base.write_adapter(folder, config, seed & ((1 << 63) - 1))
        assert config.targets is not None
        return self._begin(
            lane, ModelConfig(rank=lora.rank, targets=config.targets, folder=self._relative(folder))
        )

    def _begin(self, lane: _Lane, config: ModelConfig) -> _Effect:
        lane.config = config
        lane.model, lane.num_since_snapshot = self._new_model(config), 0
        values = {
            "id": lane.id,
            "owner": lane.owner,
            "config": encode_json(config).decode(),
            "snapshot": NO_SNAPSHOT,
        }
        row = Change(
            "INSERT INTO models VALUES (:id, :owner, :config, :snapshot, '') "
            "ON CONFLICT DO NOTHING",
            values,
        )
        return _Effect({"type": "create_model", "model_id": lane.id}, [row])

    def _load_weights(self, lane: _Lane, request: Request, body: LoadWeights) -> _Effect:
        folder, config = self.checkpoint(body.path, request.owner)
        file = folder / STATE
        if not file.exists():
            raise BadRequest(f"{body.path} is for sampling only; load what save_state has written")
        if lane.model is None:
            own = self.folder / MODELS / _name(lane.id)
            self.base.copy_adapter(own, folder, load_file(folder / ADAPTER_WEIGHTS))
            config = msgspec.structs.replace(config, folder=self._relative(own))
            effect = self._begin(lane, config)
        else:
            effect = _Effect(None)
        assert lane.model is not None
        lane.model.restore(file.read_bytes(), with_optimizer=body.optimizer)
        # The weights may be gone when this would be applied again.
        effect.needs_snapshot = True
        effect.content = {"type": "load_weights", "path": body.path, "model_id": lane.id}
        return effect

    def _save(
        self, lane: _Lane, model: TrainedModel, request: Request, body: SaveWeights
    ) -> _Effect:
        assert lane.config is not None
        is_state = request.kind is Kind.SAVE
        part = "weights" if is_state else "sampler_weights"
        name = body.path or f"ephemeral-{request.number}"
        path = f"tinker://{lane.id}/{part}/{name}"
        query = "SELECT folder FROM checkpoints WHERE path = :path"
        if self.journal.rows(query, path=path) and not body.overwrite:
            raise BadRequest(f"{path} exists; pass overwrite=True or another name")
        self._check_space(request.owner)
        folder = self.folder / CHECKPOINTS / _name(request.id)
        self.base.copy_adapter(folder, self.folder / lane.config.folder, model.adapter)
        if is_state:
            write_durably(folder / STATE, model.state())
        num_bytes = sum(one.stat().st_size for one in folder.iterdir() if one.stat().st_nlink == 1)
        is_ephemeral = body.path is None
        ttl_s = self.limits.keep_s if is_ephemeral else body.ttl_seconds
        config = msgspec.structs.replace(lane.config, folder=self._relative(folder))
        row = Change(
            "INSERT INTO checkpoints VALUES (:path, :owner, :folder, :config, :num_bytes, :ends_at)"
            " ON CONFLICT (path) DO UPDATE SET folder = excluded.folder, config = excluded.config,"
            " num_bytes = excluded.num_bytes, ends_at = excluded.ends_at",
            {
                "path": path,
                "owner": request.owner,
                "folder": self._relative(folder),
                "config": encode_json(config).decode(),
                "num_bytes": num_bytes,
                "ends_at": None if ttl_s is None else self._clock() + ttl_s,
            },
        )
        answer: dict[str, Any] = {"type": request.kind.value, "path": path}
        changes = [row]
        if is_ephemeral and not is_state:
            session = lane.id.rpartition(":train:")[0]
            id = f"{session}:sample:{body.sampling_session_seq_id or 0}"
            changes.append(sampler_row(id, request.owner, path, self._relative(folder)))
            answer = {"type": request.kind.value, "sampling_session_id": id}
        return _Effect(answer, changes)

    def _check_space(self, owner: str) -> None:
        query = "SELECT COALESCE(SUM(num_bytes), 0) FROM checkpoints WHERE owner = :owner"
        [(used,)] = self.journal.rows(query, owner=owner)
        if used >= self.limits.max_stored_bytes:
            raise BadRequest(
                f"this credential keeps {used >> 20} MiB of saved weights, its limit; save with "
                "ttl_seconds, or overwrite"
            )

    # --- states on disk --------------------

    def _snapshot(self, lane: _Lane, number: int) -> list[Change]:
        assert lane.model is not None
        state = lane.model.state()
        write_durably(self._state_file(lane, number), state)
        lane.num_since_snapshot = 0
        values = {"id": lane.id, "number": number, "digest": digest_of(state)}
        return [
            Change("UPDATE models SET snapshot = :number, digest = :digest WHERE id = :id", values),
            Change(
                "UPDATE requests SET body = NULL WHERE lane = :id AND number < :number "
                "AND state != 'waiting'",
                values,
            ),
        ]

    def _read_state(self, file: Path, digest: str) -> bytes:
        state = file.read_bytes()
        if digest_of(state) != digest:
            raise StoreError(f"{file} is damaged; restore the server's folder from a backup")
        return state

    def _state_file(self, lane: _Lane, number: int) -> Path:
        folder = self.folder / STATES / _name(lane.id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{number}.safetensors"

    def _delete_old_states(self, lane: _Lane) -> None:
        if lane.num_since_snapshot:
            return
        query = "SELECT snapshot FROM models WHERE id = :id"
        for (number,) in self.journal.rows(query, id=lane.id):
            live = self._state_file(lane, number)
            for file in live.parent.iterdir():
                if file != live:
                    file.unlink(missing_ok=True)

    def checkpoint(self, path: str, owner: str) -> tuple[Path, ModelConfig]:
        """Folder and config of saved weights; raises BadRequest."""
        query = "SELECT owner, folder, config FROM checkpoints WHERE path = :path"
        found = self.journal.rows(query, path=path)
        if not found or found[0][0] != owner:
            raise BadRequest(f"no saved weights {path} of this credential")
        _, folder, config = found[0]
        return self.folder / folder, msgspec.json.decode(config, type=ModelConfig)

    def _relative(self, folder: Path) -> str:
        return str(folder.relative_to(self.folder))

    # --- sampling --------------------

    async def _sample(self, request: Request) -> None:
        async with self._sampling:
            try:
                body = decode(self.journal.body(request), Sample, media_type=JSON)
                content = await self._sampled(request, body)
                result = Result(state=State.DONE, content=content, media_type=PROTOBUF)
            except USER_ERRORS as error:
                result = _failure(error, "user")
            except StoreError:
                raise
            except Exception as error:
                log.exception("sampling failed", request=request.id)
                result = _failure(error, "server")
            await self._finish(request, result)

    async def _sampled(self, request: Request, body: Sample) -> bytes:
        folder = self.folder / self.sampler(request.lane, request.owner)[0]
        if not folder.exists():
            raise BadRequest("the weights of this sampling client are gone; save them again")
        ids = prompt_ids(body)
        if not ids or max(ids) >= self.base.vocab_size:
            raise BadRequest(f"a prompt has tokens 0 to {self.base.vocab_size - 1}, at least one")
        found = await self._samplers.sample(request.id, folder, body, self.base.window)
        scores = None
        if body.prompt_logprobs:
            scores = await self._in_thread(lambda: self._scorer(folder).prompt_logprobs(ids))
            if body.prompt_logprobs_last_n is not None:
                scores[: max(0, scores.size - body.prompt_logprobs_last_n)] = np.nan
        return write_samples(found, scores)

    def sampler(self, id: str, owner: str) -> tuple[str, str]:
        """Folder and path of a sampling session's weights; raises NotFound."""
        found = self.journal.rows("SELECT owner, folder, path FROM samplers WHERE id = :id", id=id)
        if not found or found[0][0] != owner:
            raise NotFound(f"no sampling session {id} of this credential")
        return found[0][1], found[0][2]

    def _scorer(self, folder: Path) -> AdaptedModel:
        """The trainer's model with a sampling client's weights; only the newest is kept."""
        found = self._scorers.get(folder.name)
        if found is None:
            config = LoraConfig(**_read_shape(folder))
            self._scorers.clear()
            found = self._scorers[folder.name] = AdaptedModel(self.base, folder, config)
        return found

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
            is_old = folder.stat().st_mtime < now - self.limits.keep_s
            if is_old and self._relative(folder) not in used:  # it was overwritten
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        # A result whose request may still be applied again stays: its body is needed.
        await self.journal.write(
            Change(
                "DELETE FROM requests WHERE state != 'waiting' AND at < :before AND "
                "(kind = 'sample' OR (body IS NULL AND number < (SELECT MAX(r.number) FROM "
                "requests r WHERE r.lane = requests.lane AND r.state != 'waiting')))",
                {"before": now - self.limits.keep_s},
            )
        )


def sampler_row(id: str, owner: str, path: str, folder: str) -> Change:
    values = {"id": id, "owner": owner, "path": path, "folder": folder}
    statement = "INSERT INTO samplers VALUES (:id, :owner, :path, :folder) ON CONFLICT DO NOTHING"
    return Change(statement, values)


def _failure(error: Exception, category: str) -> Result:
    """As the SDK reads it."""
    text = str(error) if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: {error}"
    content = encode_json({"error": hide_secrets(text), "category": category})
    return Result(state=State.FAILED, content=content, media_type=JSON)


def _name(id: str) -> str:
    return digest_of(id.encode())[:32]


def _read_shape(folder: Path) -> dict[str, Any]:
    found = msgspec.json.decode((folder / ADAPTER_CONFIG).read_bytes())
    return {
        "rank": found["r"],
        "alpha": found["lora_alpha"],
        "targets": tuple(found["target_modules"]),
    }
