# SPDX-License-Identifier: Apache-2.0
"""The gateway over real HTTP, with disconnecting agents and hostile clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import anthropic
import openai
import pytest
from starlette.routing import Route
from tests.unit.gateway.gateway_harness import (
    LINE_ENDS,
    ON_FIRE,
    POLICY,
    GatewayHarness,
    let_the_server_notice,
    running_gateway,
    until,
)

from penstock.errors import Busy, EngineError
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.model_calls import Answer, Usage
from penstock.gateway.quotas import Quotas
from penstock.gateway.server import DIALECTS, MAX_BODY_BYTES
from penstock.types import FinishReason, SamplingSpec

ASK: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "policy", "messages": ASK},
    "/v1/completions": {"model": "policy", "prompt": "hi"},
    "/v1/responses": {"model": "policy", "input": "hi"},
    "/v1/messages": {"model": "policy", "messages": ASK, "max_tokens": 64},
}


def test_every_dialect_is_tested_here() -> None:
    assert set(BODIES) == {dialect.path for dialect in DIALECTS}


# --- keys and documents -------------------------------------------------------------------------


async def test_keys_of_closed_and_other_sessions(harness: GatewayHarness) -> None:
    other = harness.gateway.open(policies=[POLICY], sampling=SamplingSpec(), seed=0)
    for options in ({"api_key": "sk-unknown"}, {"path": f"/sessions/{other.id}/v1"}):
        async with harness.openai(**options) as agent:
            with pytest.raises(openai.AuthenticationError) as refused:
                await agent.chat.completions.create(model="policy", messages=ASK)
            assert refused.value.code == "invalid_api_key"
    harness.gateway.close(harness.session)
    async with harness.openai() as agent:
        with pytest.raises(openai.AuthenticationError, match="rollout has ended"):
            await agent.chat.completions.create(model="policy", messages=ASK)


async def test_every_route_is_documented_and_needs_a_key(harness: GatewayHarness) -> None:
    async with harness.http() as http:
        document = (await http.get("/openapi.json")).json()
        listed = {
            (path, method.upper())
            for path, methods in document["paths"].items()
            for method in methods
        }
        routed = {
            (route.path, method)
            for route in cast(list[Route], harness.app.routes)
            for method in route.methods or ()
        }
        assert listed == routed
        del http.headers["authorization"]
        for path, method in sorted(listed):
            status = (await http.request(method, path.format(session_id="x", role="r"))).status_code
            assert status == (200 if path == "/healthz" else 401), (method, path)
        assert (await http.get("/nothing")).json()["error"]["code"] == "no_such_route"
        assert (await http.put("/healthz")).json()["error"]["code"] == "method_not_allowed"
        shape = (await http.get("/v1/messages")).json()
        assert shape["type"] == "error" and shape["error"]["type"] == "invalid_request_error"


# --- hostile bodies -----------------------------------------------------------------------------

HOSTILE = {
    "random": os.urandom(512),
    "pickle": pickle.dumps({"model": "policy", "messages": []}),
    "empty": b"",
    "list": b"[]",
    "no messages": b'{"model": "policy"}',
    "empty messages": b'{"model": "policy", "max_tokens": 9, "messages": [], "input": []}',
    "no role": b'{"model": "policy", "messages": [{"content": "x"}], "input": [{"content": "x"}]}',
    "number": b'{"model": "policy", "messages": [{"role": "user", "content": 1}], "input": 1}',
    "deep": b'{"model": "policy", "messages": ' + b"[" * 100_000,
    "deep object": b'{"model": "policy", "prompt": "x", "input": "x", "max_tokens": 9, "messages": '
    b'[{"role": "user", "content": "x", "x": ' + b'{"x":' * 2000 + b"1" + b"}" * 2000 + b"}], "
    b'"n": 65, "previous_response_id": "x"}',
    "surrogate": b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}], '
    b'"max_tokens": 9, "input": "\\ud800", "prompt": "\\ud800"}',
    "cut utf-8": b'{"model": "policy", "messages": [{"role": "user", "content": "\xff"}]}',
    "huge integer": b'{"model": "policy", "prompt": "x", "input": "x", "max_tokens": 9, "seed": '
    + b"9" * 40
    + b', "messages": [{"role": "user", "content": "x"}]}',
}


async def test_hostile_bodies_are_the_senders_fault(harness: GatewayHarness) -> None:
    async with harness.http() as http:
        for path in BODIES:
            for name, body in HOSTILE.items():
                answer = await http.post(path, content=body)
                assert 400 <= answer.status_code < 500, (path, name, answer.text)
                assert answer.json()["error"]["type"] == "invalid_request_error", (path, name)
    assert harness.engine.num_started == 0


async def test_oversized_bodies_are_refused_declared_or_not(harness: GatewayHarness) -> None:
    async def drip() -> AsyncIterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 262_144 + 2):
            yield b" " * 262_144

    async with harness.http() as http:
        for body in (b" " * (MAX_BODY_BYTES + 1), drip()):
            answer = await http.post("/v1/chat/completions", content=body)
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "too_large"


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"x": schema}}
    return schema


def function(schema: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


HOSTILE_TOOLS: dict[str, Any] = {
    "nested": {"tools": [function(nested(20))]},
    "many": {"tools": [function({})] * 129},
    "large": {"tools": [function({"description": "x" * 300_000})]},
    "no name": {"tools": [{"type": "function", "function": {"name": ["x"]}}]},
    "no function": {"tools": [{"type": "function", "function": "x"}]},
    "strange": {"tools": [{"type": {"x": 1}}]},
    "nested format": {"schema": nested(20)},
    "long pattern": {"schema": {"type": "string", "pattern": "(a|a)*" * 50}},
    "repeats": {"schema": {"type": "string", "pattern": "((a{1,999}){1,999}){1,999}"}},
    "pattern key": {"schema": {"patternProperties": {"(a{9999}){9999}": {}}}},
    "counts": {"schema": {"type": "array", "items": {}, "minItems": 10**9}},
    "large format": {"schema": {"enum": ["x" * 70_000]}},
    "no schema": {"schema": "x"},
}


async def test_hostile_tools_and_schemas_do_not_stop_the_server(harness: GatewayHarness) -> None:
    common = BODIES["/v1/chat/completions"]
    async with harness.http() as http:
        for name, extra in HOSTILE_TOOLS.items():
            if "schema" in extra:
                format = {"type": "json_schema", "json_schema": {"name": "x", **extra}}
                extra = {"response_format": format}
            answer = await http.post("/v1/chat/completions", json={**common, **extra})
            assert answer.status_code in (400, 413), (name, answer.text)
        assert harness.engine.num_started == 0
        slow = {"type": "string", "pattern": "^(a+)+$"}
        body = {**common, "tools": [function(slow)]}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200  # a pattern in a tool is only text to the gateway


# --- forbidden paths ----------------------------------------------------------------------------

FORBIDDEN = [
    "/pause",
    "/resume",
    "/is_paused",
    "/abort_requests",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/collective_rpc",
    "/server_info",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/update_weights",
    "/start_weight_update",
    "/finish_weight_update",
    "/init_weight_transfer_engine",
    "/get_world_size",
    "/update_weight_version",
    "/weight_info",
    "/weight_checker",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/invocations",
    "/ping",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v1/score",
    "/v1/rerank",
    "/v2/rerank",
    "/v1/embeddings",
    "/v1/audio/transcriptions",
    "/v1/audio/speech",
    "/v1/audio/translations",
    "/v1/images/generations",
    "/v1/files",
    "/v1/batches",
    "/v1/fine_tuning/jobs",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/chat/completions/render",
    "/v1/realtime",
    "/v1/responses/resp_1",
    "/v1/responses/resp_1/cancel",
    "/v1/messages/count_tokens",
    "/v1/models/policy",
    "/inference/v1/generate",
    "/generate",
    "/generate_stream",
    "/get_model_info",
    "/flush_cache",
    "/metrics",
    "/pause_generation",
    "/continue_generation",
    "/update_weights_from_disk",
    "/release_memory_occupation",
    "/load",
    "/version",
    "/health",
    "/docs",
    "/redoc",
    "/start_profile",
    "/stop_profile",
    "/",
    "/v1",
    "/sessions",
]
ESCAPES: tuple[Callable[[str], str], ...] = (
    lambda path: path.replace("/", "//"),
    lambda path: "/" + "".join(f"%{ord(letter):02x}" for letter in path[1:]),
    lambda path: "/v1/chat/completions/.." + path,
    lambda path: "/v1/models/%2e%2e/%2e%2e" + path,
    lambda path: "/v1/chat/completions%2f..%2f.." + path,
    lambda path: path.upper() if path.upper() != path else path + "?x",
    lambda path: path + "%00",
    lambda path: path.rstrip("/") + "/",
    lambda path: "/%2e/" + path[1:],
    lambda path: "/v1/chat/completions;" + path,
    lambda path: "/\\" + path,
)
OPEN_PATHS_WRITTEN_OTHERWISE = (
    *("/v1/chat%2fcompletions", "/v1/chat/completions/", "//v1/chat/completions", "/v1/Messages"),
    *("/V1/chat/completions", "/v1/./completions", "/v1/completions%0a", "/v1/%63ompletions"),
)


async def ask_raw(harness: GatewayHarness, requests: Sequence[tuple[str, str]]) -> list[int]:
    """Statuses over one connection, without a client library that would normalize the paths."""
    host, _, port = harness.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    statuses: list[int] = []
    for method, path in requests:
        head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {harness.session.api_key}\r\n"
        writer.write(f"{head}content-length: 2\r\n\r\n{{}}".encode())
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        statuses.append(int(answer.split()[1]))
        length = int(answer.partition("content-length:")[2].split()[0])
        if method != "HEAD":
            await reader.readexactly(length)
    writer.close()
    return statuses


async def test_only_the_listed_paths_exist(harness: GatewayHarness) -> None:
    assert len(set(FORBIDDEN)) >= 60
    prefix = f"/sessions/{harness.session.id}"
    plain = [*FORBIDDEN, *(prefix + path for path in FORBIDDEN), *OPEN_PATHS_WRITTEN_OTHERWISE]
    methods = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
    requests = [(method, path) for path in plain for method in methods[:2]]
    requests += [(method, path) for path in FORBIDDEN for method in methods[2:]]
    requests += [("POST", escape(path)) for path in FORBIDDEN for escape in ESCAPES]
    requests += [(method, path) for path in BODIES for method in methods if method != "POST"]
    statuses = await ask_raw(harness, requests)
    open_doors = [
        (request, status)
        for request, status in zip(requests, statuses, strict=True)
        if status not in (404, 405)
    ]
    assert open_doors == []
    assert harness.engine.num_started == 0


# --- agents that disconnect ---------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_without_a_reader_never_reached_its_agent(
    harness: GatewayHarness, path: str, is_stream: bool
) -> None:
    harness.engine.gate.clear()
    async with harness.http() as http:
        call = asyncio.create_task(http.post(path, json={**BODIES[path], "stream": is_stream}))
        await until(lambda: harness.engine.num_started > 0)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    await let_the_server_notice()
    harness.engine.gate.set()
    await until(lambda: len(harness.session.turns()) > 0)
    await until(lambda: not harness.session.turns()[0].reached_agent)


@pytest.mark.parametrize("is_live", [True, False])
@pytest.mark.parametrize("path", BODIES)
async def test_no_text_breaks_the_lines_of_a_stream(
    harness: GatewayHarness, path: str, is_live: bool
) -> None:
    harness.engine.lines, harness.engine.is_live = [f"a{LINE_ENDS}b"], is_live
    heard: list[str] = []
    async with (
        harness.http() as http,
        http.stream("POST", path, json={**BODIES[path], "stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            kind, _, data = line.partition(": ")
            assert kind in ("", "event", "data"), line
            if kind == "data" and data != "[DONE]":
                heard.append(json.dumps(json.loads(data), ensure_ascii=False))
    assert all(any(end in event for event in heard) for end in LINE_ENDS)


@pytest.mark.parametrize("path", BODIES)
async def test_an_agent_that_leaves_in_mid_stream_was_not_reached(
    harness: GatewayHarness, path: str
) -> None:
    harness.engine.waits_at = 2
    harness.engine.gate.clear()
    async with (
        harness.http() as http,
        http.stream("POST", path, json={**BODIES[path], "stream": True}) as answer,
    ):
        async for line in answer.aiter_lines():
            if '"a' in line:
                break
    await let_the_server_notice()
    harness.engine.gate.set()
    await until(lambda: len(harness.session.turns()) > 0)
    await until(lambda: not harness.session.turns()[0].reached_agent)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_failed_choice_leaves_its_siblings_unreached(
    harness: GatewayHarness, is_stream: bool
) -> None:
    original = harness.gateway.generate

    async def second_fails(request: GenerationRequest) -> Completion:
        if harness.engine.num_started == 1:
            await let_the_server_notice()
            raise EngineError("one of them failed")
        return await original(request)

    harness.gateway.generate = second_fails
    async with harness.http() as http:
        body = {**BODIES["/v1/chat/completions"], "n": 2, "stream": is_stream}
        answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == (200 if is_stream else 503)
    assert "one of them failed" in answer.text
    assert [turn.reached_agent for turn in harness.session.turns()] == [False]


async def test_internal_errors_hide_their_details(harness: GatewayHarness) -> None:
    async def broken(*_: Any, **__: Any) -> Completion:
        raise ZeroDivisionError("secret")

    harness.gateway.generate = broken
    async with harness.http() as http:
        for path, body in BODIES.items():
            answer = await http.post(path, json=body)
            assert answer.status_code == 500
            assert "secret" not in answer.text


# --- quotas -------------------------------------------------------------------------------------


async def test_calls_at_a_time_are_limited_per_session(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path, Quotas(max_concurrent_calls=2)) as harness,
        harness.http() as http,
    ):
        harness.engine.gate.clear()
        path = "/v1/chat/completions"
        held = [
            asyncio.create_task(http.post(path, json={**BODIES[path], "stream": is_stream}))
            for is_stream in (False, True)
        ]
        await until(lambda: harness.engine.num_started == 2)
        for path, body in BODIES.items():
            answer = await http.post(path, json=body)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
        async with harness.openai() as agent, harness.anthropic() as other:
            with pytest.raises(openai.RateLimitError):
                await agent.completions.create(model="policy", prompt="x")
            with pytest.raises(anthropic.RateLimitError):
                await other.messages.create(model="policy", messages=ASK, max_tokens=9)
        second = harness.gateway.open(
            policies=[POLICY], sampling=SamplingSpec(max_tokens=8), seed=0
        )
        harness.engine.gate.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200, 200]
        assert (await http.post(path, json=BODIES[path])).status_code == 200
        harness.engine.gate.clear()
        headers = {"authorization": f"Bearer {second.api_key}"}
        free = asyncio.create_task(http.post(path, json=BODIES[path], headers=headers))
        await until(lambda: harness.engine.num_started == 4)
        harness.engine.gate.set()
        assert (await free).status_code == 200


async def test_tokens_are_limited_per_minute(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path, Quotas(tokens_per_minute=6)) as harness,
        harness.http() as http,
    ):
        path = "/v1/completions"
        assert (await http.post(path, json={**BODIES[path], "stream": True})).status_code == 200
        assert (await http.post(path, json=BODIES[path])).status_code in (200, 429)
        answer = await http.post(path, json=BODIES[path])
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1


async def test_a_failed_call_gives_its_place_back(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path, Quotas(max_concurrent_calls=1)) as harness,
        harness.http() as http,
    ):
        path = "/v1/chat/completions"
        body = {**BODIES[path], "temperature": ON_FIRE}
        for is_stream in (False, True, False):
            answer = await http.post(path, json={**body, "stream": is_stream})
            assert "on fire" in answer.text
        assert (await http.post(path, json=BODIES[path])).status_code == 200


def test_the_token_quota_refills_with_time(tmp_path: Path) -> None:
    now = 0.0
    quotas = Quotas(max_concurrent_calls=9, tokens_per_minute=60, clock=lambda: now)
    session: Any = type("Session", (), {})()
    session.root = session
    usage = Usage(prompt_tokens=60, completion_tokens=30)
    quotas.charge(session, [Answer(text="", finish=FinishReason.STOP, turn=0, usage=usage)])
    with pytest.raises(Busy) as refused, quotas.reserve(session, 1):
        pass
    assert refused.value.retry_after_s == pytest.approx(30.0)
    now = 30.0
    with quotas.reserve(session, 9), pytest.raises(Busy), quotas.reserve(session, 1):
        pass
    with quotas.reserve(session, 9):
        pass


# --- roles ----------------------------------------------------------------------------------------


async def test_clients_name_their_role_by_model_or_by_url(harness: GatewayHarness) -> None:
    """The URL wins: the model name of an agent may be fixed."""
    harness.session.roles = {"solver": POLICY, "judge": POLICY}
    session = f"/sessions/{harness.session.id}"
    for path, model in (
        ("", "solver"),
        ("/roles/judge", "gpt-4o"),
        (f"{session}/roles/judge", "solver"),
        ("/roles/policy", "solver"),
        ("", "policy"),
    ):
        async with (
            harness.openai(path=f"{path}/v1") as agent,
            harness.anthropic(path=path) as other,
        ):
            chat = await agent.chat.completions.create(model=model, messages=ASK)
            assert chat.model == model, "as the client sent it"
            await agent.responses.create(model=model, input="x")
            await agent.completions.create(model=model, prompt="x")
            async with other.messages.stream(model=model, messages=ASK, max_tokens=9) as stream:
                await stream.get_final_message()
    roles = [turn.role for turn in harness.session.turns()]
    assert roles == [role for role in ("solver", "judge", "judge", "", "") for _ in range(4)]
    assert {turn.policy for turn in harness.session.turns()} == {POLICY}


async def test_roles_are_listed_and_unknown_ones_refused(harness: GatewayHarness) -> None:
    harness.session.roles = {"solver": POLICY}
    async with harness.http() as http:
        for path in ("", "/roles/solver"):
            listed = (await http.get(f"{path}/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["solver", "policy"]
        body = {"model": "policy", "messages": ASK}
        refused = await http.post("/roles/solvr/v1/chat/completions", json=body)
        assert refused.status_code == 404
        assert "unknown model 'solvr'; this session has: solver, policy" in refused.text
        for path in ("/roles//v1", "/roles/solver/x/v1", "/roles/solver%2f/v1", "/roles/v1"):
            assert (await http.post(f"{path}/chat/completions", json=body)).status_code == 404
