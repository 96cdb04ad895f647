# SPDX-License-Identifier: Apache-2.0
"""A Tinker service in this process on the tiny model, and requests to it without the SDK."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.tinker.folder import ServerFile, TinkerFolder
from penstock.tinker.journal import Change, Kind, Request, Result, State
from penstock.tinker.limits import Limits
from penstock.tinker.protocol import MESSAGES
from penstock.tinker.service import TinkerService
from penstock.tinker.serving import open_service
from penstock.wire.codec import encode_json

TINY = "builtin:tiny-qwen3"
RANK = 4
WAIT_S = 300.0
LINE = tuple[Sequence[int], Mapping[str, Sequence[float]]]


def make_folder(path: Path) -> TinkerFolder:
    folder = TinkerFolder(path=path)
    folder.prepare(ServerFile(model=TINY, init=TINY, is_deterministic=True))
    return folder


@asynccontextmanager
async def opened(
    folder: TinkerFolder, *, snapshot_every: int = 4, limits: Limits | None = None
) -> AsyncGenerator[Client]:
    async with open_service(folder, snapshot_every=snapshot_every, limits=limits) as service:
        yield Client(service)


def pass_body(
    model: str,
    number: int,
    lines: Sequence[LINE],
    *,
    loss: str = "cross_entropy",
    settings: Mapping[str, float] | None = None,
    is_forward_only: bool = False,
) -> bytes:
    """As the SDK writes it: tokens and inputs of each datum, `target_tokens` as integers."""
    body = MESSAGES["ForwardBackwardRequest"](
        model_id=model, seq_id=number, loss_fn=loss, forward_only=is_forward_only
    )
    for name, value in (settings or {}).items():
        body.loss_fn_config.add(key=name, value=value)
    for tokens, inputs in lines:
        datum = body.data.add()
        datum.model_input.add().encoded_text.tokens = np.asarray(tokens, np.int32).tobytes()
        for name, values in inputs.items():
            is_ids = name == "target_tokens"
            tensor = datum.loss_fn_inputs.add(key=name).value
            tensor.dense = np.asarray(values, np.int64 if is_ids else np.float32).tobytes()
            tensor.dtype = 2 if is_ids else 1
            tensor.shape.append(len(values))
    return body.SerializeToString()


def random_lines(seed: int, count: int = 3) -> list[LINE]:
    draw = random.Random(seed)
    lines: list[LINE] = []
    for _ in range(count):
        ids = [draw.randrange(3, 14) for _ in range(draw.randrange(3, 9))]
        lines.append((ids[:-1], {"target_tokens": ids[1:]}))
    return lines


def read_logprobs(content: bytes) -> tuple[np.ndarray[Any, Any], dict[str, float]]:
    """Log-probs of all data one after another, and metrics."""
    found = MESSAGES["ForwardBackwardOutput"]()
    found.ParseFromString(content)
    (pair,) = found.loss_fn_outputs[0].fields
    values = np.frombuffer(pair.value.data, np.float32)
    return values, {pair.key: pair.value for pair in found.metrics}


@dataclass(slots=True)
class Client:
    """One credential's use of a service."""

    service: TinkerService
    owner: str = "alice"
    numbers: dict[str, int] = field(default_factory=dict[str, int])
    bodies: dict[str, bytes] = field(default_factory=dict[str, bytes])
    """Of requests, by id."""

    async def create(self, session: str = "s-1", *, rank: int = RANK, seed: int = 3) -> str:
        """A model."""
        id = f"{session}:train:0"
        body = {
            "session_id": session,
            "model_seq_id": 0,
            "base_model": TINY,
            "lora_config": {"rank": rank, "seed": seed},
        }
        await self.send(Kind.CREATE, id, 0, encode_json(body))
        self.numbers[id] = 0
        await self.done(f"{id}:0")
        return id

    async def send(self, kind: Kind, lane: str, number: int, body: bytes) -> str:
        id = f"{lane}:{number}"
        request = Request(id=id, lane=lane, number=number, owner=self.owner, kind=kind)
        self.bodies[id] = body
        await self.service.submit(request, body)
        return id

    async def next(self, kind: Kind, model: str, **fields: Any) -> str:
        """The model's next request, in JSON."""
        self.numbers[model] += 1
        body = {"model_id": model, "seq_id": self.numbers[model], **fields}
        return await self.send(kind, model, self.numbers[model], encode_json(body))

    async def train(self, model: str, seed: int, *, loss: str = "cross_entropy") -> list[str]:
        """A forward and backward pass, then an optimizer call."""
        self.numbers[model] = number = self.numbers[model] + 1
        body = pass_body(model, number, random_lines(seed), loss=loss)
        first = await self.send(Kind.FORWARD_BACKWARD, model, number, body)
        return [first, await self.next(Kind.OPTIM, model, adam_params={"learning_rate": 1e-2})]

    async def result(self, id: str) -> Result:
        found = await self.service.await_result(id, self.owner, WAIT_S)
        assert found is not None, f"{id} has no result after {WAIT_S} s"
        return await self.service.result(id)

    async def done(self, id: str) -> bytes:
        found = await self.result(id)
        assert found.state is State.DONE, found.content
        return found.content

    async def error(self, id: str) -> str:
        found = await self.result(id)
        assert found.state is State.FAILED
        return json.loads(found.content)["error"]

    async def weights(self, model: str) -> bytes:
        """Everything the model consists of, bit for bit."""
        saved = await self.next(Kind.SAVE, model, path="all", overwrite=True)
        path = json.loads(await self.done(saved))["path"]
        folder, _ = self.service.effects.checkpoint(path, self.owner)
        return (folder / "state.bin").read_bytes()

    async def sampling_session(self, model: str, number: int = 0) -> str:
        saved = await self.next(Kind.SAVE_SAMPLER, model, sampling_session_seq_id=number)
        return json.loads(await self.done(saved))["sampling_session_id"]

    async def sample(self, session: str, number: int, prompt: Sequence[int], **fields: Any) -> str:
        body = {
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [*prompt]}]},
            "sampling_params": {"max_tokens": 8, **fields.pop("sampling_params", {})},
            "sampling_session_id": session,
            "seq_id": number,
            **fields,
        }
        return await self.send(Kind.SAMPLE, session, number, encode_json(body))

    async def forget_results(self, *ids: str) -> None:
        """As a crash between the effect of a request and its result would leave it."""
        for id in ids:
            statement = (
                "UPDATE requests SET state = 'waiting', content = NULL, body = :body WHERE id = :id"
            )
            values = {"id": id, "body": self.bodies[id]}
            await self.service.journal.write(Change(statement, values))
