# SPDX-License-Identifier: Apache-2.0
"""The Tinker API over HTTP: routes, ids of what they make, and who may use it.

Owns the ids. They follow from the session and the client's own numbers, so that a request that is
sent again after a lost answer is the same request. Whatever belongs to another credential does not
exist.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette

from penstock.errors import BadRequest, NotFound
from penstock.gateway.fair_queue import FairQueue
from penstock.tinker.folder import BASE_ADAPTER, KEY_PREFIX
from penstock.tinker.journal import Change, Kind, Request, sampler_row
from penstock.tinker.protocol import (
    PROTOBUF,
    Anything,
    CreateModel,
    CreateSamplingSession,
    CreateSession,
    Future,
    Heartbeat,
    LoadWeights,
    ModelQuery,
    OptimStep,
    Path,
    Retrieve,
    SaveWeights,
    read_forward_backward,
)
from penstock.tinker.service import TinkerService
from penstock.wire.auth import Role, Verifier
from penstock.wire.call_budget import CallBudget, Share
from penstock.wire.codec import JSON, encode_json
from penstock.wire.routes import (
    Call,
    RawResponse,
    StreamedResponse,
    bearer_token,
    route,
    routes_of,
)
from penstock.wire.server import SMALL_ANSWER_BYTES, Lifespan, build_app

T = TypeVar("T")
CLIENTS = frozenset({Role.TRAINER, Role.ADMIN})
MAX_BODY_BYTES = 16 << 20
"""The SDK sends parts of 5 MB."""
POLL_S = 20.0
"""How long a request for a result is held; the SDK gives up after 45 s."""
PIECE_BYTES = 256 << 10


def api_key(headers: Mapping[str, str]) -> str:
    """The token in the SDK's header, which puts a prefix before it, or a bearer token."""
    found = headers.get("x-api-key", "") or bearer_token(headers)
    return found.removeprefix(KEY_PREFIX)


def build(
    service: TinkerService, verifier: Verifier, *, tokenizer: str, lifespan: Lifespan | None = None
) -> Starlette:
    routes = routes_of(TinkerRoutes(service, tokenizer))
    return build_app(routes, verifier, title="Tinker API", lifespan=lifespan, token_of=api_key)


class TinkerRoutes:
    def __init__(self, service: TinkerService, tokenizer: str) -> None:
        """tokenizer: what clients load their tokenizer from."""
        self._service = service
        self._tokenizer = tokenizer
        self._sending = CallBudget()
        self._turns = FairQueue(1)
        self._reader = ThreadPoolExecutor(1, "tinker-bodies")
        """Separate, because commits of the journal use the common threads."""

    @route("GET", "/api/v1/healthz", CLIENTS)
    async def health(self, call: Call) -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "ok"}

    @route("POST", "/api/v1/client/config", CLIENTS)
    async def client_config(self, call: Call, body: Anything) -> dict[str, Any]:
        """How a client should behave."""
        return {}

    @route("POST", "/api/v1/client/dynamic_config", CLIENTS)
    async def client_dynamic_config(self, call: Call, body: Anything) -> dict[str, Any]:
        """The same, for what may change."""
        return {}

    @route("POST", "/api/v1/telemetry", CLIENTS, max_body_bytes=8 << 20)
    async def telemetry(self, call: Call, body: bytes) -> dict[str, str]:
        """Accepts a client's telemetry, and drops it."""
        return {"status": "accepted"}

    @route("GET", "/api/v1/get_server_capabilities", CLIENTS)
    async def capabilities(self, call: Call) -> dict[str, Any]:
        """The base model, and its window."""
        return {
            "supported_models": [
                {
                    "model_name": self._service.model_name,
                    "max_context_length": self._service.base.window,
                    "trainable": True,
                    "sampleable": True,
                }
            ]
        }

    @route("POST", "/api/v1/create_session", CLIENTS)
    async def create_session(self, call: Call, body: CreateSession) -> dict[str, str]:
        """A client's session; ids of models and sampling sessions begin with its id."""
        id = f"s-{secrets.token_hex(8)}"
        values = {"id": id, "owner": call.credential.subject}
        insert = "INSERT INTO sessions (id, owner) VALUES (:id, :owner)"
        await self._service.keep_row(call.credential.subject, Change(insert, values))
        return {"type": "create_session", "session_id": id}

    @route("POST", "/api/v1/session_heartbeat", CLIENTS)
    async def heartbeat(self, call: Call, body: Heartbeat) -> dict[str, str]:
        """Whether the session is known."""
        self._check_session(call, body.session_id)
        return {"type": "session_heartbeat"}

    @route("POST", "/api/v1/sessions/{session_id}/finish", CLIENTS)
    async def finish(self, call: Call, body: Anything) -> dict[str, str]:
        """A client's goodbye; its weights stay."""
        self._check_session(call, call.path["session_id"])
        return {}

    # --- models --------------------

    @route("POST", "/api/v1/create_model", CLIENTS)
    async def create_model(self, call: Call, body: CreateModel) -> Future:
        """A new adapter of the base model."""
        lane = self._model_id(call, body.session_id, body.model_seq_id)
        return await self._accept(call, Kind.CREATE, lane, 0, encode_json(body))

    @route("POST", "/api/v1/load_weights", CLIENTS)
    async def load_weights(self, call: Call, body: LoadWeights) -> Future:
        """Saved weights into a model, or into a new one."""
        if body.session_id is not None and body.model_seq_id is not None:
            lane, number = self._model_id(call, body.session_id, body.model_seq_id), 0
        elif body.model_id is not None and body.seq_id:
            lane, number = body.model_id, body.seq_id
        else:
            raise BadRequest("name a model and a number from 1, or a session and a model's number")
        return await self._accept(call, Kind.LOAD, lane, number, encode_json(body))

    @route(
        "POST",
        "/api/v1/forward_backward",
        CLIENTS,
        max_body_bytes=MAX_BODY_BYTES,
        shares_budget=True,
    )
    async def forward_backward(self, call: Call, body: bytes) -> Future:
        """Log-probs and, unless only those are asked for, a gradient; protobuf."""
        asked = await self._read(call, read_forward_backward, body)
        kind = Kind.FORWARD if asked.is_forward_only else Kind.FORWARD_BACKWARD
        return await self._accept(call, kind, asked.model_id, asked.number, body)

    @route("POST", "/api/v1/optim_step", CLIENTS)
    async def optim_step(self, call: Call, body: OptimStep) -> Future:
        """One optimizer call with the gradient so far."""
        return await self._accept(call, Kind.OPTIM, body.model_id, body.seq_id, encode_json(body))

    @route("POST", "/api/v1/save_weights", CLIENTS)
    async def save_weights(self, call: Call, body: SaveWeights) -> Future:
        """Weights and optimizer, to continue from."""
        return await self._accept(call, Kind.SAVE, body.model_id, body.seq_id, encode_json(body))

    @route("POST", "/api/v1/save_weights_for_sampler", CLIENTS)
    async def save_weights_for_sampler(self, call: Call, body: SaveWeights) -> Future:
        """Weights to sample from: under a name, or as a new sampling session."""
        content = encode_json(body)
        return await self._accept(call, Kind.SAVE_SAMPLER, body.model_id, body.seq_id, content)

    @route("POST", "/api/v1/get_info", CLIENTS)
    async def get_info(self, call: Call, body: ModelQuery) -> dict[str, Any]:
        """Base model, rank and tokenizer of a model."""
        config = self._service.model_config(body.model_id, call.credential.subject)
        name = self._service.model_name
        return {
            "type": "get_info",
            "model_id": body.model_id,
            "model_name": name,
            "is_lora": True,
            "lora_rank": config.rank,
            "model_data": {"model_name": name, "tokenizer_id": self._tokenizer},
        }

    @route("POST", "/api/v1/weights_info", CLIENTS)
    async def weights_info(self, call: Call, body: Path) -> dict[str, Any]:
        """Base model and adapter of saved weights."""
        _, config = self._service.effects.checkpoint(body.tinker_path, call.credential.subject)
        return {
            "base_model": self._service.model_name,
            "is_lora": True,
            "lora_rank": config.rank,
        }

    # --- sampling --------------------

    @route("POST", "/api/v1/create_sampling_session", CLIENTS)
    async def create_sampling_session(
        self, call: Call, body: CreateSamplingSession
    ) -> dict[str, str]:
        """Fixed weights to sample from: saved ones, or the base model's."""
        self._check_session(call, body.session_id)
        owner, service = call.credential.subject, self._service
        if body.model_path is not None:
            saved, _ = service.effects.checkpoint(body.model_path, owner)
            folder = service.effects.relative(saved)
        elif body.base_model == service.model_name:
            folder = BASE_ADAPTER
        else:
            raise BadRequest(
                f"no model {body.base_model!r} here; this server has {service.model_name!r}"
            )
        id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        await service.keep_row(owner, sampler_row(id, owner, body.model_path or "", folder))
        return {"type": "create_sampling_session", "sampling_session_id": id}

    @route("GET", "/api/v1/samplers/{id}", CLIENTS)
    async def sampler(self, call: Call) -> dict[str, Any]:
        """What a sampling session samples from."""
        id = call.path["id"]
        _, path = self._service.sampling.session(id, call.credential.subject)
        found = {"sampler_id": id, "base_model": self._service.model_name}
        return found | ({"model_path": path} if path else {})

    @route("POST", "/api/v1/asample", CLIENTS, max_body_bytes=8 << 20, shares_budget=True)
    async def sample(self, call: Call, body: bytes) -> Future:
        """Answers to a prompt, with their log-probs; JSON."""
        sampling = self._service.sampling
        asked = await self._read(call, sampling.read, body)
        lane = asked.sampling_session_id
        sampling.session(lane, call.credential.subject)
        future = await self._accept(call, Kind.SAMPLE, lane, asked.seq_id, encode_json(asked))
        ids = [f"{future.request_id}:{index}" for index in range(asked.num_samples)]
        return Future(request_id=future.request_id, sample_sequence_ids=ids)

    # --- results --------------------

    @route("POST", "/api/v1/retrieve_future", CLIENTS, response=None)
    async def retrieve(self, call: Call, body: Retrieve) -> RawResponse | StreamedResponse:
        """The result of a request; waits some seconds for it."""
        id, owner = body.request_id, call.credential.subject
        num_bytes = await self._service.await_result(id, owner, POLL_S)
        if num_bytes is None:
            again = {"type": "try_again", "request_id": id, "queue_state": "active"}
            return RawResponse(encode_json(again), JSON)
        if num_bytes > SMALL_ANSWER_BYTES:  # numbers or answers: JSON is small
            return StreamedResponse(self._pieces(id, owner, num_bytes), num_bytes, PROTOBUF)
        found = await self._service.result(id)
        return RawResponse(found.content, found.media_type)

    async def _pieces(self, id: str, owner: str, size: int) -> AsyncGenerator[memoryview]:
        """A large result is in memory while it is sent, within the budget of its owner."""
        share = Share(self._sending)
        await share.take((owner, "results"), size)
        try:
            content = memoryview((await self._service.result(id)).content)
            for start in range(0, size, PIECE_BYTES):
                yield content[start : start + PIECE_BYTES]
        finally:
            share.give_back()

    async def _accept(self, call: Call, kind: Kind, lane: str, number: int, body: bytes) -> Future:
        owner = call.credential.subject
        id = f"{lane}:{number}"
        request = Request(id=id, lane=lane, number=number, owner=owner, kind=kind)
        await self._service.submit(request, body)
        return Future(request_id=id, model_id=None if kind is Kind.SAMPLE else lane)

    def _model_id(self, call: Call, session: str, number: int) -> str:
        self._check_session(call, session)
        return f"{session}:train:{number}"

    def _check_session(self, call: Call, id: str) -> None:
        query = "SELECT owner FROM sessions WHERE id = :id"
        if self._service.journal.rows(query, id=id) != [(call.credential.subject,)]:
            raise NotFound(f"no session {id} of this credential")

    async def _read(self, call: Call, read: Callable[[bytes], T], body: bytes) -> T:
        """In a thread, one at a time: a small body may have many parts. Clients take turns."""
        async with self._turns.place(call.credential.subject):
            return await asyncio.get_running_loop().run_in_executor(self._reader, read, body)
