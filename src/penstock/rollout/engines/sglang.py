# SPDX-License-Identifier: Apache-2.0
"""The `sglang` engine: an SGLang server, through its documented HTTP API. **Untested on a real
server**: the contract tests use a fake server.

SGLang does not report a version per token, and drops its prefix cache only when no request waits.
So a swap aborts all running answers (`pause_generation`), loads, drops the cache and continues;
each answer is then requested again with its tokens as context. Each such part is sampled by one
version, the one that was live when it was requested, so spans are exact. An answer with stop
strings or a schema restarts instead, because the server would not see its earlier tokens.

SGLang's log-probs come from the softmax at the given temperature, before top_p, top_k and min_p.
The first load checks this; requests with top_p, top_k or min_p are rejected.

SGLang listens on a port only, and its routes load weights. Start it with `--api-key`, or in a
network namespace, so that agents on its machine cannot call it: without a key, the engine warns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import structlog

from penstock.errors import ConfigError, EngineError, RequestRejected
from penstock.gateway.generation import ChunkCallback, Completion, GenerationRequest, TokenChunk
from penstock.rollout.engine import CLOSED, EngineSettings, EngineType, SpanLog, live_for
from penstock.rollout.http_client import KEY_FILE_VARIABLE, HttpClient, read_server_key
from penstock.rollout.snapshot import Snapshot, prompt_problem, read_snapshot
from penstock.types import FinishReason, SamplingSpec, Version

CALL_S = 60.0
LOAD_S = 1800.0
ABORT_S = 5.0
"""How long an aborted answer may take to return before its connection is closed."""
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
FIX = (
    "start SGLang with --api-key, write the key to a file that only the node's user can read, and "
    f"name the file in {KEY_FILE_VARIABLE}"
)
log = structlog.get_logger(__name__)


class _Meta(msgspec.Struct, gc=False):
    output_token_logprobs: list[tuple[float, int, Any]] | None = None
    """Log-prob, id and text of all tokens so far, or of the new ones, depending on the server."""
    completion_tokens: int | None = None
    finish_reason: dict[str, Any] | None = None
    weight_version: str | None = None


class _Event(msgspec.Struct, gc=False):
    meta_info: _Meta | None = None


@dataclass(slots=True)
class _Part:
    """The tokens from one request; an answer may need several."""

    version: Version
    on_chunk: ChunkCallback | None
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    finish: str = ""
    rest: bytes = b""

    def feed(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self.feed_event(line[6:])

    def feed_event(self, text: bytes) -> None:
        try:
            meta = msgspec.json.decode(text, type=_Event).meta_info
        except (msgspec.DecodeError, RecursionError) as error:
            raise EngineError(f"cannot parse SGLang's response: {error}") from None
        if meta is None:
            raise EngineError(f"SGLang aborted an answer: {text.decode(errors='replace')[:500]}")
        entries = meta.output_token_logprobs or []
        is_cumulative = meta.completion_tokens in (None, len(entries))
        new = entries[len(self.ids) :] if is_cumulative else entries
        ids, logprobs = [entry[1] for entry in new], [min(entry[0], 0.0) for entry in new]
        self.ids += ids
        self.logprobs += logprobs
        self.finish = str((meta.finish_reason or {}).get("type", ""))
        if meta.weight_version not in (None, "default", str(self.version)):
            raise EngineError(f"SGLang serves {meta.weight_version!r}, not {self.version}")
        if ids and self.on_chunk is not None:
            self.on_chunk(TokenChunk(sampled_ids=ids, logprobs=logprobs, version=self.version))


class SglangEngine:
    def __init__(self, url: str) -> None:
        key = read_server_key()
        if not key:
            log.warning("SGLang has no key: any program near it can change its weights", fix=FIX)
        self._client = HttpClient(url, key=key)
        self._live: Version | None = None
        self._folder: Path | None = None
        self._snapshot: Snapshot | None = None
        self._lock = asyncio.Lock()
        self._is_open = asyncio.Event()
        """Set while requests may be sent."""
        self._is_idle = asyncio.Event()
        """Set while no request is in flight."""
        self._is_idle.set()
        self._num_parts = 0
        self._is_closed = False

    @property
    def live(self) -> Version | None:
        return self._live

    async def __call__(self, request: GenerationRequest) -> Completion:
        spans = SpanLog(live_for(request.policy, self._live, is_closed=self._is_closed))
        assert self._snapshot is not None
        _check_fit(request, self._snapshot)
        prompt_ids, sampling = request.prompt_ids, request.sampling
        limit = min(sampling.max_tokens, self._snapshot.window - len(prompt_ids))
        ids: list[int] = []
        logprobs: list[float] = []
        must_restart = bool(sampling.stop or sampling.json_schema)
        on_chunk = None if must_restart else request.on_chunk  # discarded tokens are not streamed
        while True:
            left = replace(sampling, max_tokens=limit - len(ids), seed=sampling.seed + len(ids))
            part = await self._generate([*prompt_ids, *ids], left, on_chunk)
            finish = FINISHES.get(part.finish)
            if finish is None and must_restart:
                continue
            spans.switch(len(ids), part.version)
            ids += part.ids
            logprobs += part.logprobs
            if finish is None and len(ids) == limit:
                finish = FinishReason.LENGTH
            if finish is not None:
                return spans.complete(ids, logprobs, finish)

    async def load(self, folder: Path, version: Version) -> None:
        async with self._lock:
            if self._is_closed:
                raise EngineError(CLOSED)
            snapshot = await asyncio.to_thread(read_snapshot, folder)
            if snapshot.adapter is not None:
                raise EngineError(
                    f"{folder} has an adapter, which this engine does not support; set engine: hf "
                    "or vllm, or remove models.NAME.lora"
                )
            if self._snapshot is not None and snapshot.tensors != self._snapshot.tensors:
                raise EngineError(
                    f"{folder} has a different architecture from the model that SGLang serves; a "
                    "policy cannot change its architecture, so start a new run for this model"
                )
            self._is_open.clear()
            try:
                await self._end_parts()
                await self._update_weights(folder, version)
                await self._call("/continue_generation", {})
                if self._live is None:
                    await self._check_logprobs()
            except BaseException:
                await self._roll_back()
                raise
            self._folder, self._snapshot, self._live = folder, snapshot, version
            self._is_open.set()

    async def close(self) -> None:
        self._is_closed, self._live = True, None
        self._client.abort(CLOSED)
        self._is_open.set()

    # --- answers ----------------------------------------------------------------------------------

    async def _generate(
        self, context: Sequence[int], spec: SamplingSpec, on_chunk: ChunkCallback | None
    ) -> _Part:
        """Request one part. If a swap ends it in any way, its finish is "abort"."""
        await self._is_open.wait()
        if self._live is None:
            raise EngineError(CLOSED if self._is_closed else "no version is live: a swap failed")
        assert self._snapshot is not None
        part = _Part(self._live, on_chunk)
        body = _body(context, spec, self._snapshot, is_streamed=on_chunk is not None)
        on_body = part.feed if on_chunk is not None else None
        self._num_parts += 1
        self._is_idle.clear()
        try:
            reply = await self._client.request("POST", "/generate", body, on_body=on_body)
        except OSError as error:
            if self._is_open.is_set():
                raise EngineError(f"connection to SGLang lost: {error}") from None
            part.finish = "abort"
            return part
        finally:
            self._num_parts -= 1
            if not self._num_parts:
                self._is_idle.set()
        if reply.status != 200:
            kind = RequestRejected if reply.status == 400 else EngineError
            raise kind(
                f"SGLang returned {reply.status}: {reply.body.decode(errors='replace')[:500]}"
            )
        if on_chunk is None:
            part.feed_event(reply.body)
        if part.finish not in FINISHES and (part.finish != "abort" or self._is_open.is_set()):
            raise EngineError(f"SGLang returned finish reason {part.finish or 'none'!r}")
        return part

    # --- versions ---------------------------------------------------------------------------------

    async def _end_parts(self) -> None:
        await self._call("/pause_generation", {"mode": "abort"})
        with suppress(TimeoutError):
            async with asyncio.timeout(ABORT_S):
                await self._is_idle.wait()
        self._client.abort("aborted for new weights")
        await self._is_idle.wait()

    async def _update_weights(self, folder: Path, version: Version) -> None:
        call = {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)}
        response = await self._call("/update_weights_from_disk", call, timeout_s=LOAD_S)
        if not response.get("success"):
            raise EngineError(f"SGLang failed to load {folder}: {response.get('message')}")

    async def _roll_back(self) -> None:
        """Restore the old weights; if that fails, no version is live."""
        before, self._live = self._live, None
        if before is not None and self._folder is not None:
            with suppress(EngineError):
                await self._update_weights(self._folder, before)
                await self._call("/continue_generation", {})
                self._live = before
        self._is_open.set()

    async def _check_logprobs(self) -> None:
        """Check that doubling the temperature halves the differences between log-probs."""
        distances: list[float] = []
        for temperature in (1.0, 2.0):
            params = {"temperature": temperature, "max_new_tokens": 1, "ignore_eos": True}
            call = {"input_ids": [1], "sampling_params": params, "return_logprob": True}
            response = await self._call("/generate", {**call, "top_logprobs_num": 2})
            try:
                first, second = response["meta_info"]["output_top_logprobs"][0][:2]
                distances.append(float(first[0]) - float(second[0]))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise EngineError(f"SGLang returned no log-probs: {error!r}") from None
        if abs(distances[0] - 2 * distances[1]) > 0.01 * abs(distances[0]) + 1e-4:
            raise EngineError(
                "SGLang's log-probs ignore the temperature, so they do not match the sampling "
                "distribution; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def _call(
        self, path: str, body: Mapping[str, object], *, timeout_s: float = CALL_S
    ) -> dict[str, Any]:
        reply = await self._client.call("SGLang", "POST", path, body, timeout_s=timeout_s)
        with suppress(msgspec.DecodeError):
            return msgspec.json.decode(reply.body, type=dict[str, Any])
        return {}


def _check_fit(request: GenerationRequest, snapshot: Snapshot) -> None:
    if (why := prompt_problem(request.prompt_ids, snapshot)) is not None:
        raise RequestRejected(why)
    spec = request.sampling
    if spec.temperature and (spec.top_p < 1 or spec.top_k or spec.min_p):
        raise RequestRejected(
            "SGLang's log-probs ignore top_p, top_k and min_p, so such samples cannot be trained; "
            "remove these settings, or set engine: vllm"
        )


def _body(
    context: Sequence[int], spec: SamplingSpec, snapshot: Snapshot, *, is_streamed: bool
) -> bytes:
    params: dict[str, object] = {
        "temperature": spec.temperature,
        "max_new_tokens": spec.max_tokens,
        "sampling_seed": spec.seed & 0x7FFF_FFFF,
        "stop_token_ids": sorted(snapshot.stop_ids),
        "ignore_eos": not spec.json_schema,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if spec.stop:
        params["stop"] = list(spec.stop)
    if spec.json_schema:
        params["json_schema"] = spec.json_schema
    call = {"input_ids": list(context), "sampling_params": params, "return_logprob": True}
    return msgspec.json.encode({**call, "stream": is_streamed})


def _build(settings: EngineSettings) -> SglangEngine:
    if not settings.url:
        raise ConfigError("engine sglang needs a running server; set sglang: {url: ...}")
    return SglangEngine(settings.url)


ENGINE = EngineType(build=_build)
