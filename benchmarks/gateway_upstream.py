# SPDX-License-Identifier: Apache-2.0
"""A bare server of the part of vLLM's protocol that penstock uses: answers made beforehand, sent as
many milliseconds later as the request says by its seed (modulo 256), whole or a token at a time.

    python -m benchmarks.gateway_upstream FIRST_ID LAST_ID    the tokens of its answers"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import sys
from array import array
from functools import cache
from typing import Any, cast

import httptools
import msgspec
import uvloop

STEP_S = 0.02
FIRST_ID, LAST_ID = map(int, sys.argv[1:3]) if len(sys.argv) == 3 else (65, 90)
label = "default"


@cache
def tokens(num: int, is_certain: bool, draw: int) -> list[tuple[int, dict[str, Any]]]:
    dice = random.Random(draw)
    logprobs = array("f", [0.0 if is_certain else -dice.expovariate(1.0) for _ in range(num)])
    ids = [dice.randint(FIRST_ID, LAST_ID) for _ in range(num)]
    entries = zip(ids, logprobs, strict=True)
    return [(i, {"token_id": i, "logprob": value, "rank": 1}) for i, value in entries]


@cache
def choice(num: int, sure: bool, draw: int, begin: int, end: int, name: str, packed: bool) -> bytes:
    made = tokens(num, sure, draw)[begin:end]
    ids, entries = [token for token, _ in made], [entry for _, entry in made]
    fields: dict[str, Any] = {"token_ids": ids, "logprobs": {"content": entries}}
    if packed:
        data = array("i", ids).tobytes() + array("f", [e["logprob"] for e in entries]).tobytes()
        fields = {"packed": base64.b64encode(data).decode()}
    spans = [{"version": name, "start": 0, "end": num}]
    last = {"weight_versions": spans, "finish_reason": "length"} if end == num else {}
    return json.dumps({"choices": [fields | last], "usage": {"completion_tokens": end}}).encode()


class Upstream(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.parser = httptools.HttpRequestParser(self)
        self.body = b""

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url, self.body = url, b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        global label
        call: dict[str, Any] = msgspec.json.decode(self.body or b"{}")
        label = call.get("new_version", label)
        if self.url != b"/inference/v1/generate":
            return self.answer(b'{"success": true, "results": [{}]}')
        params: dict[str, Any] = call["sampling_params"]
        seed = params.get("seed", 0)
        key = (params["max_tokens"], params["top_k"] == 1, seed % 16)
        wait = asyncio.get_running_loop().call_later
        if call.get("stream"):
            wait(seed % 256 / 1e3, self.stream, key, 0)
        else:
            whole = (*key, 0, key[0], label, "extra_args" in params)
            wait(seed % 256 / 1e3, lambda: self.answer(choice(*whole)))

    def answer(self, body: bytes) -> None:
        self.transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)

    def stream(self, key: tuple[int, bool, int], at: int) -> None:
        event = b"data: " + choice(*key, at, at + 1, label, False) + b"\n\n"
        is_last = at + 1 == key[0]
        chunk = b"%x\r\n%b\r\n" % (len(event), event) + (b"0\r\n\r\n" if is_last else b"")
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        self.transport.write(chunk if at else head + chunk)
        if not is_last and not self.transport.is_closing():
            asyncio.get_running_loop().call_later(STEP_S, self.stream, key, at + 1)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
