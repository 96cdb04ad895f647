# SPDX-License-Identifier: Apache-2.0
"""A fake SGLang server: the part of its HTTP API that penstock uses, without a model.

Token n of a context is a function of weights and n (the position in the full context), so a
continued answer equals an uninterrupted one, except for the weights.
"""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.contract.fake_vllm_server import VOCAB, weights_of


def token(weights: int, position: int) -> int:
    return zlib.crc32(f"{weights} {position}".encode()) % VOCAB


class SglangDouble:
    def __init__(self) -> None:
        self.weights = 0
        self.label = "default"
        self.token_s = 0.001
        self.log: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.fail_loads = 0
        self.is_raw = False
        """Log-probs ignore the temperature."""
        self.is_incremental = False
        """Events contain only new tokens."""
        self.keeps_ended = False
        """A pause does not return the running answers."""
        self._lives = 0
        self._running = asyncio.Event()
        self._running.set()
        self._num_running = 0

    def app(self) -> Starlette:
        routes = [
            Route("/generate", self.generate, methods=["POST"]),
            Route("/pause_generation", self.pause, methods=["POST"]),
            Route("/continue_generation", self.go_on, methods=["POST"]),
            Route("/update_weights_from_disk", self.update, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def pause(self, request: Request) -> Response:
        assert (await request.json())["mode"] == "abort"
        self.log.append("pause")
        self._running.clear()
        self._lives += not self.keeps_ended
        return JSONResponse({})

    async def go_on(self, request: Request) -> Response:
        self.log.append("continue")
        self._running.set()
        return JSONResponse({})

    async def update(self, request: Request) -> Response:
        call = await request.json()
        self.log.append("update")
        assert not self._running.is_set() and call["flush_cache"]
        if self._num_running:
            return JSONResponse({"success": False, "message": "requests wait"}, 400)
        if self.fail_loads:
            self.fail_loads, self.weights = self.fail_loads - 1, -1
            return JSONResponse({"success": False, "message": "half of it"})
        self.weights, self.label = weights_of(Path(call["model_path"])), call["weight_version"]
        return JSONResponse({"success": True, "message": ""})

    async def generate(self, request: Request) -> Response:
        call = await request.json()
        self.bodies.append(call)
        parts = self._parts(request, call)
        if call.get("stream"):
            return StreamingResponse(self._events(parts), media_type="text/event-stream")
        last: dict[str, Any] = {}
        async for part in parts:
            last = part
        return JSONResponse(last)

    async def _events(self, parts: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        num_told = 0
        async for part in parts:
            entries = part["meta_info"]["output_token_logprobs"]
            shown = entries[num_told:] if self.is_incremental else entries
            num_told = len(entries)
            meta = {**part["meta_info"], "output_token_logprobs": shown}
            yield f"data: {json.dumps({'meta_info': meta})}\n\n"
        yield "data: [DONE]\n\n"

    async def _parts(self, request: Request, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        self._num_running += 1
        try:
            async for part in self._sample(request, call):
                yield part
        finally:
            self._num_running -= 1

    async def _sample(
        self, request: Request, call: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        params, life, label = call["sampling_params"], self._lives, self.label
        entries: list[tuple[float, int, None]] = []
        temperature = 1.0 if self.is_raw else params["temperature"]
        top = [[[-1.0 / temperature, 1, None], [-3.0 / temperature, 2, None]]]
        finish: dict[str, str] | None = None
        while finish is None:
            await asyncio.sleep(self.token_s)
            while not self._running.is_set() and life == self._lives:
                await asyncio.sleep(0.005)
                if await request.is_disconnected():
                    return
            if life == self._lives:
                made = token(self.weights, len(call["input_ids"]) + len(entries))
                entries.append((-1.0 - made / 100, made, None))
                is_last = len(entries) == params["max_new_tokens"]
                finish = {"type": "length"} if is_last else None
            else:
                finish = {"type": "abort"}
            yield {
                "meta_info": {
                    "output_token_logprobs": list(entries),
                    "output_top_logprobs": top,
                    "completion_tokens": len(entries),
                    "finish_reason": finish,
                    "weight_version": label,
                }
            }
