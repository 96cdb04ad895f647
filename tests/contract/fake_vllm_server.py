# SPDX-License-Identifier: Apache-2.0
"""A fake vLLM 0.32 server: the part of its HTTP API that penstock uses, without a model.

Its weights are one number, read from the bytes of the loaded safetensors files; token n of an
answer is a function of weights, context and n, so a test can compute which weights sampled a token.
Tests switch faults on and off while it runs.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

VOCAB = 11
PROGRAM = """#!{python}
import json, os, subprocess, sys
sys.path[:0] = {path!r}
from pathlib import Path
import uvicorn
from starlette.responses import PlainTextResponse
from penstock.devices import visible_devices
from tests.contract.fake_vllm_server import VllmDouble
words = sys.argv[1:]
assert words[0] == "serve", words
assert words[-4:-2] == ["--dtype", "float32"]
assert ("--enforce-eager" in words) is not bool(visible_devices()), words
assert words[-2] == "--uds", words
assert os.environ["VLLM_SERVER_DEV_MODE"] == "1" and "PENSTOCK_TOKEN" not in os.environ
assert os.environ.get("VLLM_PLUGINS", "penstock").endswith("penstock")
helper = subprocess.Popen(["sleep", "1000"])
Path({pids!r}).write_text(f"{{os.getpid()}} {{helper.pid}}")
seen = {{"devices": os.environ.get("CUDA_VISIBLE_DEVICES"), "words": words}}
Path({pids!r} + f".{{os.getpid()}}.json").write_text(json.dumps(seen))
double = VllmDouble(Path(words[1]), root=Path(os.environ["PENSTOCK_WEIGHTS_ROOT"]))
app = double.app()
app.add_route("/canary", lambda request: PlainTextResponse({pids!r}))
uvicorn.run(app, uds=words[-1])
"""


def write_environment(folder: Path, pids: Path) -> Path:
    """A virtual environment whose `vllm` is this server; it writes its process ids to a file, its
    devices and arguments to another one beside it, and answers /canary with the first file's
    name."""
    program = folder / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    path = [p for p in sys.path if p] + [str(Path(__file__).parents[2])]
    program.write_text(PROGRAM.format(python=sys.executable, path=path, pids=str(pids)))
    program.chmod(0o755)
    return folder


def weights_of(folder: Path) -> int:
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.safetensors")))
    return zlib.crc32(content)


def token(weights: int, prompt: Sequence[int], at: int) -> int:
    return zlib.crc32(f"{weights} {list(prompt)} {at}".encode()) % VOCAB


class VllmDouble:
    def __init__(self, folder: Path, *, root: Path) -> None:
        self.weights = weights_of(folder)
        self.root = root
        self.label = "default"
        self.token_s = 0.001
        self.num_tokens = 0
        self.num_cut_off = 0
        """Requests whose caller disconnected."""
        self.log: list[str] = []
        """Control calls, in order."""
        self.bodies: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[int, str]] = {}
        """Injected faults: path to the status and text of its response."""
        self.fail_loads = 0
        """Number of loads that fail halfway and leave broken weights."""
        self.is_raw = False
        """Return log-probs of the plain softmax, as without `--logprobs-mode`."""
        self.has_plugin = True
        """Writes whole answers as numbers in a row when asked."""
        self.is_stalled = False
        """Healthy according to /health, but generates no tokens."""
        self.is_cutting = False
        """Closes each stream after a few tokens."""
        self.ends_with = "length"
        self.adapters: dict[str, int] = {}
        """Loaded adapters by name, each as one number like the weights."""
        self.num_lost_adapters = 0
        """Adapters unloaded while an answer was using them."""
        self._in_use: Counter[str] = Counter()
        self._running = asyncio.Event()
        self._running.set()

    def app(self) -> Starlette:
        posts = {
            "/inference/v1/generate": self.generate,
            "/pause": self.pause,
            "/resume": self.resume,
            "/collective_rpc": self.rpc,
            "/reset_prefix_cache": self.reset,
            "/update_weight_version": self.relabel,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
        }
        routes = [
            Route(path, self._guarded(path, call), methods=["POST"]) for path, call in posts.items()
        ]
        routes.append(Route("/health", self._guarded("/health", self.health)))
        routes.append(Route("/metrics", self._guarded("/metrics", self.metrics)))
        return Starlette(routes=routes)

    def _guarded(self, path: str, call: Any) -> Any:
        async def answer(request: Request) -> Response:
            if path in self.answers:
                status, text = self.answers[path]
                return PlainTextResponse(text, status)
            return await call(request)

        return answer

    async def health(self, request: Request) -> Response:
        return Response()

    async def metrics(self, request: Request) -> Response:
        count = f'vllm:generation_tokens_total{{engine="0"}} {self.num_tokens}.0\n'
        return PlainTextResponse(f"# HELP vllm:generation_tokens_total Tokens\n{count}")

    # --- control ----------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "keep", "vLLM's default loses answers"
        self.log.append("pause")
        self._running.clear()
        await asyncio.sleep(0.02)
        return JSONResponse({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        self.log.append("resume")
        self._running.set()
        return JSONResponse({"status": "resumed"})

    async def reset(self, request: Request) -> Response:
        self.log.append("reset")
        return JSONResponse({"success": True})

    async def relabel(self, request: Request) -> Response:
        self.log.append("label")
        self.label = (await request.json())["new_version"]
        return JSONResponse({"success": True})

    async def rpc(self, request: Request) -> Response:
        call = await request.json()
        folder = Path(call["args"][0])
        self.log.append(call["method"].removeprefix("penstock_"))
        if self.root not in folder.parents:
            return PlainTextResponse(f"PermissionError: {folder} is not inside the root", 500)
        if call["method"] == "penstock_load":
            assert not self._running.is_set(), "weights change only while nothing is sampled"
            if self.fail_loads:
                self.fail_loads -= 1
                self.weights = 0
                return PlainTextResponse("RuntimeError: half of it", 500)
            self.weights = weights_of(folder)
        return JSONResponse({"results": [{}]})

    async def load_adapter(self, request: Request) -> Response:
        call = await request.json()
        self.log.append("load adapter")
        if call["lora_name"] in self.adapters:
            return PlainTextResponse("has already been loaded", 400)
        self.adapters[call["lora_name"]] = weights_of(Path(call["lora_path"]))
        return PlainTextResponse("Success")

    async def unload_adapter(self, request: Request) -> Response:
        name = (await request.json())["lora_name"]
        self.log.append("unload adapter")
        self.num_lost_adapters += self._in_use[name]
        del self.adapters[name]
        return PlainTextResponse("Success")

    # --- tokens -----------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        call = await request.json()
        if any(sign in call.get("cache_salt", "") for sign in "@/\\"):
            return JSONResponse({"error": {"message": "cache_salt must not contain '@'"}}, 400)
        self.bodies.append(call)
        if call.get("model", "policy") not in {"policy", *self.adapters}:
            return JSONResponse({"error": {"message": "The model does not exist"}}, 404)
        chunks = self._watched(request, call)
        if call.get("stream"):
            return StreamingResponse(self._events(chunks), media_type="text/event-stream")
        parts = [chunk async for chunk in chunks]
        if not parts or parts[-1]["finish_reason"] is None:
            return Response(status_code=499)
        ids = array("i", [i for part in parts for i in part["token_ids"]])
        content = [e for part in parts for e in part["logprobs"]["content"]]
        whole: dict[str, Any] = {"token_ids": ids.tolist(), "logprobs": {"content": content}}
        if self.has_plugin and call["sampling_params"].get("extra_args"):
            logprobs = array("f", [entry["logprob"] for entry in content])
            whole = {"packed": base64.b64encode(ids.tobytes() + logprobs.tobytes()).decode()}
        whole |= {
            "finish_reason": parts[-1]["finish_reason"],
            "weight_versions": parts[-1]["weight_versions"],
        }
        return JSONResponse({"request_id": "r", "choices": [{"index": 0, **whole}]})

    async def _events(self, chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
        async for number, chunk in _counted(chunks):
            if self.is_cutting and number == 3:
                raise ConnectionResetError("cut off by the test")
            yield f"data: {json.dumps({'request_id': 'r', 'choices': [{'index': 0, **chunk}]})}\n\n"
        yield "data: [DONE]\n\n"

    async def _watched(
        self, request: Request, call: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        is_whole, name = False, call.get("model", "")
        self._in_use[name] += 1
        try:
            async for chunk in self._chunks(request, call):
                is_whole = chunk["finish_reason"] is not None
                yield chunk
        finally:
            self._in_use[name] -= 1
            self.num_cut_off += not is_whole

    async def _chunks(
        self, request: Request, call: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        params, prompt = call["sampling_params"], call["token_ids"]
        spans: list[dict[str, Any]] = []
        adapter = self.adapters.get(call.get("model", ""))
        for at in range(params["max_tokens"]):
            await asyncio.sleep(self.token_s)
            while self.is_stalled or not self._running.is_set():
                await asyncio.sleep(0.005)
                if await request.is_disconnected():
                    return
            if await request.is_disconnected():
                return
            if not spans or spans[-1]["version"] != self.label:
                spans.append({"version": self.label, "start": at, "end": at})
            spans[-1]["end"] = at + 1
            self.num_tokens += 1
            made = token(self.weights if adapter is None else adapter, prompt, at)
            logprob = 0.0 if params["top_k"] == 1 and not self.is_raw else -1.0 - made / 100
            is_last = at + 1 == params["max_tokens"]
            yield {
                "token_ids": [made],
                "logprobs": {"content": [{"token_id": made, "logprob": logprob, "rank": 1}]},
                "finish_reason": self.ends_with if is_last else None,
                "weight_versions": spans if is_last else None,
            }


async def _counted(
    items: AsyncIterator[dict[str, Any]],
) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    numbers = itertools.count()
    async for item in items:
        yield next(numbers), item
