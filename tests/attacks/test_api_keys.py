# SPDX-License-Identifier: Apache-2.0
"""No key of a model's API crosses a network in clear text, whichever command sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import cast

import httpx2
import pytest

from penstock.api_keys import key_headers
from penstock.errors import ConfigError, EngineError, RewardError
from penstock.gateway.model_calls import RawPrompt
from penstock.runs.local_gateway import TextServerAddress, open_gateway
from penstock.runs.logged_gateway import TextServer
from penstock.runs.prm.judge import judge_rater
from penstock.scorers import judge
from penstock.trainer.prm.traces import Trace
from penstock.types import PolicyName, SamplingSpec

KEY = "sk-canary-0123456789"


@pytest.mark.parametrize(
    "url",
    [
        "http://api.example.com/v1",
        "http://10.0.0.5:8000/v1",
        "HTTP://API.EXAMPLE.COM/v1",
        "http://127.0.0.1.evil.example/v1",
        "http://127.0.0.1@evil.example/v1",
        "http://localhost.example.com/v1",
        "ftp://api.example.com",
        "api.example.com/v1",
    ],
)
def test_a_key_is_not_sent_in_clear_text(url: str) -> None:
    with pytest.raises(ConfigError, match="MY_KEY would be sent in clear text") as caught:
        key_headers(url, KEY, "MY_KEY")
    assert KEY not in str(caught.value)
    assert key_headers(url, "", "MY_KEY") == {}


@pytest.mark.parametrize(
    "url",
    [
        "https://api.example.com/v1",
        "http://127.0.0.1:8000/v1",
        "http://localhost/v1",
        "http://[::1]/",
    ],
)
def test_a_key_is_sent_where_nobody_listens(url: str) -> None:
    assert key_headers(url, KEY, "MY_KEY") == {"Authorization": f"Bearer {KEY}"}


URL = "http://192.0.2.1:1/v1"


async def test_every_client_of_a_foreign_model_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """`prm label`, `eval`, `solve`, `try` and the scorer `judge`."""

    async def label() -> None:
        async with judge_rater(URL, "m", KEY):
            pass

    async def serve() -> None:
        address = TextServerAddress(base_url=URL, model="m", api_key=KEY)
        async with open_gateway(cast("object", None), cast("object", None), address):  # type: ignore[arg-type]
            pass

    async def call() -> None:
        async with httpx2.AsyncClient() as http:
            server = TextServer(base_url=URL, model="m", api_key=KEY, http=http)
            await server.post("chat/completions", {})

    async def score() -> None:
        await judge.reward(["a"], ["b"], ["c"])

    monkeypatch.setenv(judge.URL, URL)
    monkeypatch.setenv(judge.MODEL, "m")
    monkeypatch.setenv(judge.KEY, KEY)
    for act in (label, serve, call, score):
        with pytest.raises(ConfigError, match="in clear text"):
            await act()


@asynccontextmanager
async def listening() -> AsyncGenerator[tuple[int, list[bytes]]]:
    """A port that answers every request with an empty object, and what it heard."""
    heard: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], heard
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
@pytest.mark.parametrize("command", ["label", "serve", "score"])
async def test_a_proxy_of_the_environment_gets_no_key(
    variable: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key goes in clear text to a server on this host, and so not by way of another one."""
    async with listening() as (proxy, stolen), listening() as (port, heard):
        url = f"http://127.0.0.1:{port}/v1"
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy}")
        monkeypatch.setenv(judge.URL, url)
        monkeypatch.setenv(judge.MODEL, "m")
        monkeypatch.setenv(judge.KEY, KEY)
        if command == "label":
            async with judge_rater(url, "m", KEY) as rate:
                trace = Trace(
                    row="r", group="g", task={}, outcome="completed", reward=1.0, steps=()
                )
                assert await rate("a step", trace, 0) is None
        elif command == "serve":
            address = TextServerAddress(base_url=url, model="m", api_key=KEY)
            async with open_gateway(cast("object", None), cast("object", None), address) as gateway:  # type: ignore[arg-type]
                session = gateway.open(
                    policies=[PolicyName("p")], sampling=SamplingSpec(max_tokens=1), seed=0
                )
                with pytest.raises(EngineError, match="127"):
                    await session.call(RawPrompt(prompt="x"))
        else:
            with pytest.raises(RewardError, match="sent no chat completion"):
                await judge.reward(["a"], ["b"], ["c"])
    assert stolen == []
    assert all(f"Bearer {KEY}".encode() in request for request in heard) and heard
