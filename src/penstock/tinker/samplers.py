# SPDX-License-Identifier: Apache-2.0
"""Answers sampling requests with the `hf` engine: one base model, an adapter for each session.

Owns which adapters are loaded, and what of a sampling request an engine can do. Knows no request
ids, no journal and no client.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from penstock.errors import BadRequest
from penstock.gateway.fair_queue import FairQueue
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.decoding.continuous import MAX_ROWS, ContinuousEngine
from penstock.rollout.engines.hf import HfEngine
from penstock.seeds import GAMMA
from penstock.tinker.journal import digest_of
from penstock.tinker.protocol import Sample, Sampled
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    Version,
    view_ids,
    view_log_probs,
)

MAX_SEED = (1 << 63) - 1
MAX_LOADED = 16
"""Adapters that answer at a time, and as many that did: they are kept in memory."""
MEMORY_SHARE = 4
"""Answers together fill a quarter of the machine's memory, however long they get."""


@dataclass(slots=True)
class _Loaded:
    engine: ContinuousEngine
    version: Version
    num_running: int = 0
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    place_of: str | None = None
    """Whose place it has while it answers: of the first one who asked, not of the last."""


def max_answers(answer_bytes: int) -> int:
    """How many of at most this size may grow in memory at a time."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(MAX_ROWS, memory // MEMORY_SHARE // answer_bytes))


class Samplers:
    def __init__(self, *, threads: int, is_deterministic: bool, num_answers: int) -> None:
        """num_answers: of all clients, at a time; the others wait, and clients take turns."""
        self._answers = FairQueue(num_answers)
        self._places = FairQueue(MAX_LOADED)
        # Sums over a batch depend on its size, so a deterministic engine decodes one at a time.
        self._root = HfEngine(torch_threads=threads, max_rows=1 if is_deterministic else MAX_ROWS)
        self._loaded: OrderedDict[Path, _Loaded] = OrderedDict()

    async def close(self) -> None:
        for loaded in self._loaded.values():
            await loaded.engine.close()
        await self._root.close()

    async def sample(
        self, id: str, owner: str, folder: Path, body: Sample, window: int
    ) -> list[Sampled]:
        """`id`: the same one draws the same answers. `window`: of the model. Raises BadRequest and
        EngineError."""
        prompt = prompt_ids(body)
        spec = _spec(body, window - len(prompt))
        seed = body.sampling_params.seed
        base = int(digest_of(id.encode())[:15], 16) if seed is None else seed
        stop_ids = _stop_ids(body)
        async with self._engine(folder, owner) as loaded:

            async def answer(request: GenerationRequest) -> Completion:
                async with self._answers.place(owner):
                    return await loaded.engine(request)

            requests = [
                GenerationRequest(
                    prompt,
                    replace(spec, seed=(base + index * GAMMA) & MAX_SEED),
                    policy=loaded.version.policy,
                    session=id,
                )
                for index in range(body.num_samples)
            ]
            found = await asyncio.gather(*map(answer, requests))
        return [_sampled(one, stop_ids) for one in found]

    @asynccontextmanager
    async def _engine(self, folder: Path, owner: str) -> AsyncGenerator[_Loaded]:
        loaded = self._loaded.get(folder)
        if loaded is None:
            policy = PolicyName(digest_of(str(folder).encode())[:16])
            version = Version(policy=policy, incarnation=0, number=0)
            loaded = self._loaded[folder] = _Loaded(self._root.share(), version)
        self._loaded.move_to_end(folder)
        loaded.num_running += 1
        try:
            async with loaded.loading:
                if loaded.place_of is None:
                    await self._places.take(owner)
                    loaded.place_of = owner
                if loaded.engine.live is None:
                    await loaded.engine.load(folder, loaded.version)
            yield loaded
        finally:
            loaded.num_running -= 1
            if loaded.place_of is not None and not loaded.num_running:
                place_of, loaded.place_of = loaded.place_of, None
                self._places.release(place_of)
            await self._drop_idle()

    async def _drop_idle(self) -> None:
        idle = [one for one, loaded in self._loaded.items() if not loaded.num_running]
        for folder in idle[: max(0, len(self._loaded) - MAX_LOADED)]:
            await self._loaded.pop(folder).engine.close()


def prompt_ids(body: Sample) -> list[int]:
    if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
        raise BadRequest("the prompt has other chunks than encoded_text; send tokens only")
    return [token for chunk in body.prompt.chunks for token in chunk.tokens]


def _spec(body: Sample, room: int) -> SamplingSpec:
    params = body.sampling_params
    if body.topk_prompt_logprobs or body.topk_sample_logprobs or body.prompt_alt_tokens_k:
        raise BadRequest("this server has log-probs of the tokens themselves, no top-k of others")
    if body.target_prompt_logprobs is not None or body.record_stability_info:
        raise BadRequest("this server has no target_prompt_logprobs and no stability information")
    if params.stop == []:
        raise BadRequest("stop=[]: this server cannot sample beyond the model's end token")
    if room < 1:
        raise BadRequest("the prompt fills the model's window; shorten it")
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    fields = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(0, params.top_k),
        "max_tokens": min(params.max_tokens or room, room),
        "stop": [stop for stop in stops if isinstance(stop, str)],
    }
    try:
        return msgspec.convert(fields, SamplingSpec)
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling_params: {error}") from None


def _stop_ids(body: Sample) -> frozenset[int]:
    stop = body.sampling_params.stop
    return frozenset(one for one in stop or () if isinstance(one, int))


def _sampled(found: Completion, stop_ids: frozenset[int]) -> Sampled:
    """Cut after the first stop token: what comes before it was drawn without knowing of it."""
    tokens, logprobs = [*view_ids(found.sampled_ids)], [*view_log_probs(found.logprobs)]
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
    is_cut = end is None and found.finish is not FinishReason.STOP
    return Sampled(tokens=tokens[:end], logprobs=logprobs[:end], is_cut=is_cut)
