# SPDX-License-Identifier: Apache-2.0
"""What requests do to a model, in memory and on disk: all of it follows from the request's row.

Owns the files of models, of their states and of saved weights, and counts what they take. Runs
where the models are, one request at a time; knows no order, no result and no other lane.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file

from penstock.durable import write_durably
from penstock.errors import BadRequest, NotFound, StoreError
from penstock.tinker.journal import Change, Journal, Kind, Request, digest_of, sampler_row
from penstock.tinker.lanes import Lane, ModelConfig
from penstock.tinker.limits import Limits
from penstock.tinker.losses import read_loss
from penstock.tinker.models import BaseModel, TrainedModel
from penstock.tinker.protocol import (
    CreateModel,
    LoadWeights,
    OptimStep,
    SaveWeights,
    read_forward_backward,
    write_outputs,
)
from penstock.tinker.stored_bytes import StoredBytes
from penstock.weights.manifest import ADAPTER_WEIGHTS
from penstock.wire.codec import JSON, decode, encode_json

REPLAYED = (Kind.CREATE, Kind.LOAD, Kind.FORWARD_BACKWARD, Kind.OPTIM)
"""What changes a model; all else is not computed again."""
NO_SNAPSHOT = -1
CHECKPOINTS, MODELS, STATES = "checkpoints", "models", "states"
STATE = "state.bin"
"""Of saved weights: optimizer and all. Not `*.safetensors`, which engines would read as weights."""


@dataclass(slots=True)
class Effect:
    """What a request did, besides its change to the model."""

    content: Any
    """A record for JSON, or bytes of protobuf."""
    changes: list[Change] = field(default_factory=list[Change])
    needs_snapshot: bool = False


class Effects:
    def __init__(
        self,
        folder: Path,
        journal: Journal,
        base: BaseModel,
        *,
        model_name: str,
        limits: Limits,
        clock: Callable[[], float],
    ) -> None:
        """folder: of the server. model_name: of the base, as clients call it."""
        self._folder = folder
        self._journal = journal
        self._base = base
        self._model_name = model_name
        self._limits = limits
        self._clock = clock
        self.stored = StoredBytes(self._stored_bytes, limits.max_stored_bytes)
        for name in (CHECKPOINTS, MODELS, STATES):
            (folder / name).mkdir(exist_ok=True)

    def load(self, lane: Lane) -> None:
        """The model as all finished requests have left it."""
        query = "SELECT config, snapshot, digest FROM models WHERE id = :id"
        found = self._journal.rows(query, id=lane.id)
        if not found:
            raise NotFound(f"there is no model {lane.id}; its creation failed")
        config, number, digest = found[0]
        lane.config = msgspec.json.decode(config, type=ModelConfig)
        model = self._new_model(lane.config)
        if number != NO_SNAPSHOT:
            model.restore(self._read_state(self._state_file(lane, number), digest))
        lane.model, lane.num_since_snapshot = model, 0
        for request in self._journal.done_after(lane.id, number):
            if request.kind in REPLAYED and request.kind is not Kind.CREATE:
                self.apply(lane, request)
                lane.num_since_snapshot += 1

    def _new_model(self, config: ModelConfig) -> TrainedModel:
        return TrainedModel(self._base, self._folder / config.folder, config.lora)

    def apply(self, lane: Lane, request: Request) -> Effect:
        body = self._journal.body(request)
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
                return Effect(write_outputs(passed.logprobs, passed.metrics))
            case Kind.OPTIM:
                step = decode(body, OptimStep, media_type=JSON)
                return Effect({"metrics": model.optim_step(step.adam_params)})
            case _:
                saved = decode(body, SaveWeights, media_type=JSON)
                return self._save(lane, model, request, saved)

    def _create(self, lane: Lane, body: CreateModel) -> Effect:
        if body.base_model != self._model_name:
            raise BadRequest(
                f"no model {body.base_model!r} here; this server has {self._model_name!r}"
            )
        if body.optimizer_config.type != "adamw":
            raise BadRequest(f"no optimizer {body.optimizer_config.type!r} here; there is adamw")
        self.stored.require(lane.owner)
        lora = body.lora
        config = self._base.lora_config(lora)
        seed = int(digest_of(lane.id.encode())[:15], 16) if lora.seed is None else lora.seed
        folder = self._folder / MODELS / _name(lane.id)
        self._base.write_adapter(folder, config, seed & ((1 << 63) - 1))
        self.stored.add(lane.owner, _own_bytes(folder))
        assert config.targets is not None
        return self._begin(
            lane, ModelConfig(rank=lora.rank, targets=config.targets, folder=self.relative(folder))
        )

    def _begin(self, lane: Lane, config: ModelConfig) -> Effect:
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
        return Effect({"type": "create_model", "model_id": lane.id}, [row])

    def _load_weights(self, lane: Lane, request: Request, body: LoadWeights) -> Effect:
        folder, config = self.checkpoint(body.path, request.owner)
        file = folder / STATE
        if not file.exists():
            raise BadRequest(f"{body.path} is for sampling only; load what save_state has written")
        if lane.model is None:
            self.stored.require(request.owner)
            own = self._folder / MODELS / _name(lane.id)
            self._base.copy_adapter(own, folder, load_file(folder / ADAPTER_WEIGHTS))
            self.stored.add(request.owner, _own_bytes(own))
            config = msgspec.structs.replace(config, folder=self.relative(own))
            effect = self._begin(lane, config)
        else:
            effect = Effect(None)
        assert lane.model is not None
        lane.model.restore(file.read_bytes(), with_optimizer=body.optimizer)
        # The weights may be gone when this would be applied again.
        effect.needs_snapshot = True
        effect.content = {"type": "load_weights", "path": body.path, "model_id": lane.id}
        return effect

    def _save(self, lane: Lane, model: TrainedModel, request: Request, body: SaveWeights) -> Effect:
        assert lane.config is not None
        is_state = request.kind is Kind.SAVE
        part = "weights" if is_state else "sampler_weights"
        name = body.path or f"ephemeral-{request.number}"
        path = f"tinker://{lane.id}/{part}/{name}"
        query = "SELECT folder FROM checkpoints WHERE path = :path"
        if self._journal.rows(query, path=path) and not body.overwrite:
            raise BadRequest(f"{path} exists; pass overwrite=True or another name")
        self.stored.require(request.owner)
        folder = self._folder / CHECKPOINTS / _name(request.id)
        self._base.copy_adapter(folder, self._folder / lane.config.folder, model.adapter)
        if is_state:
            write_durably(folder / STATE, model.state())
        num_bytes = _own_bytes(folder)
        self.stored.add(request.owner, num_bytes)
        is_ephemeral = body.path is None
        ttl_s = self._limits.keep_s if is_ephemeral else body.ttl_seconds
        config = msgspec.structs.replace(lane.config, folder=self.relative(folder))
        # Sampling clients may still use what is overwritten, so it is kept for a while, and counts.
        values = {"path": path, "folder": self.relative(folder)}
        replaced = Change(
            "UPDATE checkpoints SET path = 'replaced/' || folder, ends_at = :ends_at "
            "WHERE path = :path AND folder != :folder",
            {**values, "ends_at": self._clock() + self._limits.keep_s},
        )
        row = Change(
            "INSERT INTO checkpoints VALUES (:path, :owner, :folder, :config, :num_bytes, :ends_at)"
            " ON CONFLICT (path) DO NOTHING",
            {
                **values,
                "owner": request.owner,
                "config": encode_json(config).decode(),
                "num_bytes": num_bytes,
                "ends_at": None if ttl_s is None else self._clock() + ttl_s,
            },
        )
        answer: dict[str, Any] = {"type": request.kind.value, "path": path}
        changes = [replaced, row]
        if is_ephemeral and not is_state:
            session = lane.id.rpartition(":train:")[0]
            id = f"{session}:sample:{body.sampling_session_seq_id or 0}"
            changes.append(sampler_row(id, request.owner, path, self.relative(folder)))
            answer = {"type": request.kind.value, "sampling_session_id": id}
        return Effect(answer, changes)

    def _stored_bytes(self, owner: str) -> int:
        """On disk now."""
        found = self._journal.rows("SELECT id FROM models WHERE owner = :owner", owner=owner)
        names = [_name(id) for (id,) in found]
        folders = [self._folder / part / name for part in (MODELS, STATES) for name in names]
        return self._journal.stored_bytes(owner) + sum(map(_own_bytes, folders))

    # --- states on disk --------------------

    def snapshot(self, lane: Lane, number: int) -> list[Change]:
        assert lane.model is not None
        state = lane.model.state()
        write_durably(self._state_file(lane, number), state)
        self.stored.add(lane.owner, len(state))
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

    def _state_file(self, lane: Lane, number: int) -> Path:
        folder = self._folder / STATES / _name(lane.id)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{number}.safetensors"

    def delete_old_states(self, lane: Lane) -> None:
        if lane.num_since_snapshot:
            return
        query = "SELECT snapshot FROM models WHERE id = :id"
        for (number,) in self._journal.rows(query, id=lane.id):
            live = self._state_file(lane, number)
            for file in live.parent.iterdir():
                if file != live:
                    file.unlink(missing_ok=True)

    def checkpoint(self, path: str, owner: str) -> tuple[Path, ModelConfig]:
        """Folder and config of saved weights; raises BadRequest."""
        query = "SELECT owner, folder, config FROM checkpoints WHERE path = :path"
        found = self._journal.rows(query, path=path)
        if not found or found[0][0] != owner:
            raise BadRequest(f"no saved weights {path} of this credential")
        _, folder, config = found[0]
        return self._folder / folder, msgspec.json.decode(config, type=ModelConfig)

    def relative(self, folder: Path) -> str:
        return str(folder.relative_to(self._folder))


def _own_bytes(folder: Path) -> int:
    """Without hard links to files of the base model."""
    num_bytes = 0
    with suppress(FileNotFoundError):  # it is deleted meanwhile
        for file in folder.iterdir():
            found = file.stat()
            num_bytes += found.st_size if found.st_nlink == 1 else 0
    return num_bytes


def _name(id: str) -> str:
    return digest_of(id.encode())[:32]
