# SPDX-License-Identifier: Apache-2.0
"""The gateway over real HTTP, called by the unmodified `openai` package and by rude strangers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
import openai
import pytest
from starlette.applications import Starlette
from starlette.routing import Route
from tests.unit.gateway.chatml import END_ID, ids_of, write_snapshot

from penstock.errors import EngineError
from penstock.gateway.gateway import Gateway, Session
from penstock.gateway.generate import Completion
from penstock.gateway.renderer import Renderer
from penstock.gateway.server import MAX_BODY_BYTES, build_app
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    VersionSpan,
    log_probs,
    token_ids,
    view_ids,
)
from penstock.wire.server import server

POLICY = PolicyName("policy")
MESSAGES: Any = [{"role": "user", "content": "hi"}]


class EchoSeed:
    """Answers `abc`, then the end; holds back while `gate` is shut; fails at temperature 99."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_started = 0
        self.specs: list[SamplingSpec] = []

    async def __call__(
        self, prompt_ids: Sequence[int], sampling: SamplingSpec, *, policy: PolicyName, session: str
    ) -> Completion:
        self.num_started += 1
        self.specs.append(sampling)
        await self.gate.wait()
        if sampling.temperature == 99:
            raise EngineError("the engine is on fire")
        ids = [*ids_of("abc"), END_ID]
        return Completion(
            sampled_ids=token_ids(ids),
            logprobs=log_probs([-0.25] * len(ids)),
            spans=(VersionSpan(start=0, end=len(ids), incarnation=1, number=0),),
            finish=FinishReason.STOP,
        )


@dataclass
class Running:
    url: str
    app: Starlette
    gateway: Gateway
    engine: EchoSeed
    session: Session

    def agent(self, *, path: str = "/v1", api_key: str = "") -> openai.AsyncOpenAI:
        key = api_key or self.session.api_key
        return openai.AsyncOpenAI(base_url=self.url + path, api_key=key, max_retries=0)

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.session.api_key}"}


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited ten seconds in vain")


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    engine = EchoSeed()
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, Renderer.load(write_snapshot(tmp_path)))
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(max_tokens=8), seed=3)
    app = build_app(gateway)
    service = server(app, "127.0.0.1", 0)
    task = asyncio.create_task(service.serve())
    await until(lambda: service.started)
    port = service.servers[0].sockets[0].getsockname()[1]
    yield Running(f"http://127.0.0.1:{port}", app, gateway, engine, session)
    service.should_exit = True
    engine.gate.set()
    await task


async def test_async_agent(running: Running) -> None:
    async with running.agent() as agent:
        answer = await agent.chat.completions.create(
            model="policy", messages=MESSAGES, logprobs=True, temperature=0.5, user="me"
        )
    choice = answer.choices[0]
    assert choice.message.content == "abc"
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert [entry.logprob for entry in choice.logprobs.content] == [-0.25] * 4
    assert "".join(entry.token for entry in choice.logprobs.content) == "abc<|im_end|>"
    assert answer.usage is not None and answer.usage.completion_tokens == 4
    (turn,) = running.gateway.close(running.session)
    assert list(view_ids(turn.sampled_ids)) == [*ids_of("abc"), END_ID]
    assert turn.sampling.temperature == 0.5
    assert turn.reached_agent


async def test_sync_agent_streams(running: Running) -> None:
    def stream() -> tuple[str, list[Any]]:
        url, key = f"{running.url}/sessions/{running.session.id}/v1", running.session.api_key
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as agent:
            assert [model.id for model in agent.models.list()] == ["policy"]
            chunks = list(
                agent.chat.completions.create(
                    model="policy",
                    messages=MESSAGES,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        return "".join(texts), chunks

    text, chunks = await asyncio.to_thread(stream)
    assert text == "abc"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens > 4
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert len(running.session.turns()) == 1


async def test_async_stream_without_usage_and_a_second_turn(running: Running) -> None:
    async with running.agent() as agent:
        stream = await agent.chat.completions.create(model="policy", messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
        assert all(chunk.usage is None for chunk in chunks)
        said = "".join(c.choices[0].delta.content or "" for c in chunks)
        follow_up: Any = [
            *MESSAGES,
            {"role": "assistant", "content": said},
            {"role": "user", "content": [{"type": "text", "text": "more"}]},
        ]
        await agent.chat.completions.create(model="policy", messages=follow_up)
    assert [turn.parent for turn in running.session.turns()] == [-1, 0]


async def test_several_choices_are_several_turns(running: Running) -> None:
    async with running.agent() as agent:
        answer = await agent.chat.completions.create(
            model="policy", messages=MESSAGES, n=3, seed=5, max_completion_tokens=6, stop=["c"]
        )
        with pytest.raises(openai.BadRequestError, match="between 1 and 8"):
            await agent.chat.completions.create(model="policy", messages=MESSAGES, n=9)
    assert [choice.message.content for choice in answer.choices] == ["ab"] * 3
    turns = running.session.turns()
    assert len(turns) == 3
    assert turns[0].sampling.seed == 5
    assert len({turn.sampling.seed for turn in turns}) == 3
    assert {turn.sampling.max_tokens for turn in turns} == {6}


async def test_errors_have_openais_shape(running: Running) -> None:
    async with running.agent() as agent:
        with pytest.raises(openai.NotFoundError) as missing:
            await agent.chat.completions.create(model="gpt-9", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        assert "one of: policy" in missing.value.message
        tools: Any = [{"type": "function", "function": {"name": "f"}}]
        with pytest.raises(openai.BadRequestError, match="tools: not supported"):
            await agent.chat.completions.create(model="policy", messages=MESSAGES, tools=tools)
        with pytest.raises(openai.BadRequestError, match="response_format"):
            await agent.chat.completions.create(
                model="policy", messages=MESSAGES, response_format={"type": "json_object"}
            )
        image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
        with pytest.raises(openai.BadRequestError, match="only text parts"):
            await agent.chat.completions.create(model="policy", messages=image)
        with pytest.raises(openai.InternalServerError, match="on fire"):
            await agent.chat.completions.create(model="policy", messages=MESSAGES, temperature=99)
    assert running.session.turns() == ()


async def test_keys_of_closed_and_other_sessions(running: Running) -> None:
    other = running.gateway.open(policies=[POLICY], sampling=SamplingSpec(), seed=0)
    for options in (
        {"api_key": "sk-unknown"},
        {"path": f"/sessions/{other.id}/v1"},
    ):
        async with running.agent(**options) as agent:
            with pytest.raises(openai.AuthenticationError) as refused:
                await agent.chat.completions.create(model="policy", messages=MESSAGES)
            assert refused.value.code == "invalid_api_key"
    running.gateway.close(running.session)
    async with running.agent() as agent:
        with pytest.raises(openai.AuthenticationError, match="rollout has ended"):
            await agent.chat.completions.create(model="policy", messages=MESSAGES)


async def test_every_route_is_documented_and_needs_a_key(running: Running) -> None:
    async with httpx2.AsyncClient(base_url=running.url, headers=running.headers()) as http:
        document = (await http.get("/openapi.json")).json()
    listed = {
        (path, method.upper()) for path, methods in document["paths"].items() for method in methods
    }
    routed = {
        (route.path, method)
        for route in cast(list[Route], running.app.routes)
        for method in route.methods or ()
    }
    assert listed == routed
    async with httpx2.AsyncClient(base_url=running.url) as http:
        for path, method in sorted(listed):
            status = (await http.request(method, path.format(session_id="x"))).status_code
            assert status == (200 if path == "/healthz" else 401), (method, path)
        assert (await http.get("/nothing")).json()["error"]["code"] == "not_found"
        assert (await http.put("/healthz")).json()["error"]["code"] == "method_not_allowed"


HOSTILE = {
    "random": os.urandom(512),
    "pickle": pickle.dumps({"model": "policy", "messages": []}),
    "empty": b"",
    "list": b"[]",
    "no messages": b'{"model": "policy"}',
    "empty messages": b'{"model": "policy", "messages": []}',
    "no role": b'{"model": "policy", "messages": [{"content": "x"}]}',
    "wrong type": b'{"model": "policy", "messages": [{"role": "user", "content": 1}]}',
    "deep": b'{"model": "policy", "messages": ' + b"[" * 100_000,
    "lone surrogate": b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "cut utf-8": b'{"model": "policy", "messages": [{"role": "user", "content": "\xff"}]}',
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bodies_are_the_senders_fault(running: Running, name: str) -> None:
    async with httpx2.AsyncClient(base_url=running.url, headers=running.headers()) as http:
        for path in ("/v1/chat/completions", f"/sessions/{running.session.id}/v1/chat/completions"):
            answer = await http.post(path, content=HOSTILE[name])
            assert 400 <= answer.status_code < 500, answer.text
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert running.session.turns() == ()


async def test_oversized_bodies_are_refused_declared_or_not(running: Running) -> None:
    async def drip() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65_536 + 2):
            yield b" " * 65_536

    async with httpx2.AsyncClient(base_url=running.url, headers=running.headers()) as http:
        for body in (b" " * (MAX_BODY_BYTES + 1), drip()):
            answer = await http.post("/v1/chat/completions", content=body)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "too_large"


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_without_a_reader_never_reached_its_agent(
    running: Running, is_stream: bool
) -> None:
    running.engine.gate.clear()
    body = {"model": "policy", "messages": MESSAGES, "stream": is_stream}
    async with httpx2.AsyncClient(base_url=running.url, headers=running.headers()) as http:
        call = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(lambda: running.engine.num_started > 0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    await asyncio.sleep(0.05)
    running.engine.gate.set()
    await until(lambda: len(running.session.turns()) > 0)
    await asyncio.sleep(0.05)
    (turn,) = running.session.turns()
    assert not turn.reached_agent


async def test_a_failed_choice_leaves_its_siblings_unreached(running: Running) -> None:
    original = running.gateway.generate

    async def second_fails(
        prompt_ids: Sequence[int], sampling: SamplingSpec, *, policy: PolicyName, session: str
    ) -> Completion:
        if running.engine.num_started == 1:
            raise EngineError("one of them failed")
        return await original(prompt_ids, sampling, policy=policy, session=session)

    running.gateway.generate = second_fails
    async with running.agent() as agent:
        with pytest.raises(openai.InternalServerError, match="one of them"):
            await agent.chat.completions.create(model="policy", messages=MESSAGES, n=2)
    assert [turn.reached_agent for turn in running.session.turns()] == [False]
