# SPDX-License-Identifier: Apache-2.0
"""Answers sampling requests with the `hf` engine: one base model, an adapter for each session.

Owns which adapters are loaded, and what of a sampling request an engine can do. Knows no request
ids, no journal and no client.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic

import msgspec

from penstock.errors import BadRequest
from penstock.gateway.fair_queue import FairQueue
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.sampling import check_spec
from penstock.rollout.decoding.continuous import MAX_ROWS, ContinuousEngine
from penstock.rollout.engines.hf import HfEngine
from penstock.seeds import GAMMA
from penstock.tinker.folder import BASE_ADAPTER
from penstock.tinker.journal import digest_of
from penstock.tinker.protocol import Sample, Sampled
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    TokenIds,
    Version,
    token_ids,
    view_ids,
    view_log_probs,
)

MAX_SEED = (1 << 63) - 1
MAX_LOADED = 16
"""Adapters that answer at a time, and as many that did: they are kept in memory."""
TURN_S = 2.0
"""While others wait for a place, answers join for this long those that have one: enough to decode
many together."""
MAX_RESULT_TOKENS = 64 << 20
"""Of all answers to a request, each of 8 bytes: SQLite stores no result of a billion bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is in memory of a request while it waits: four bytes for a token."""

    prompt: TokenIds
    spec: SamplingSpec
    seed: int | None
    stop_ids: frozenset[int]
    num_samples: int
    scores_from: int | None
    """The first token of the prompt whose log-prob is asked for."""


@dataclass(slots=True)
class _Weights:
    """Of one folder."""

    version: Version
    key: str
    """Takes turns under it: its owner, and for the base model, which all share, its folder."""
    engine: ContinuousEngine | None = None
    """While they are loaded."""
    num_asking: int = 0
    """Answers that are sampled or wait."""
    num_answering: int = 0
    """While there are any, the weights have a place."""
    turn_ends_at: float = 0.0
    """Without an end, a client with answers at all times would keep its place."""
    entering: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last answer ends."""


class Samplers:
    def __init__(self, *, threads: int, is_deterministic: bool, num_answers: int) -> None:
        """num_answers: of all clients, at a time; the others wait, and clients take turns."""
        self._answers = FairQueue(num_answers)
        self._places = FairQueue(MAX_LOADED)
        # Sums over a batch depend on its size, so a deterministic engine decodes one at a time.
        self._root = HfEngine(torch_threads=threads, max_rows=1 if is_deterministic else MAX_ROWS)
        self._weights: OrderedDict[Path, _Weights] = OrderedDict()

    async def close(self) -> None:
        for weights in self._weights.values():
            if weights.engine is not None:
                await weights.engine.close()
        await self._root.close()

    async def sample(self, id: str, owner: str, folder: Path, asked: Question) -> list[Sampled]:
        """`id`: the same one draws the same answers. Raises EngineError."""
        base = int(digest_of(id.encode())[:15], 16) if asked.seed is None else asked.seed
        answers: list[asyncio.Task[Completion]] = []
        try:
            for index in range(asked.num_samples):
                weights, engine = await self._enter(folder, owner)
                leave = partial(self._leave, folder, weights)
                try:
                    await self._answers.take(owner)  # before anything is made for the answer
                except BaseException:
                    leave()
                    raise
                request = GenerationRequest(
                    view_ids(asked.prompt).tolist(),
                    replace(asked.spec, seed=(base + index * GAMMA) & MAX_SEED),
                    policy=weights.version.policy,
                    session=id,
                )
                answers.append(asyncio.create_task(engine(request)))
                answers[-1].add_done_callback(lambda _: self._answers.release(owner))
                answers[-1].add_done_callback(lambda _, leave=leave: leave())
            found = await asyncio.gather(*answers)
        finally:
            for answer in answers:
                answer.cancel()
        return [_sampled(one, asked.stop_ids) for one in found]

    async def _enter(self, folder: Path, owner: str) -> tuple[_Weights, ContinuousEngine]:
        """The weights, loaded and in a place until the answer leaves them."""
        weights = self._weights.get(folder)
        if weights is None:
            policy = PolicyName(digest_of(str(folder).encode())[:16])
            version = Version(policy=policy, incarnation=0, number=0)
            key = str(folder) if folder.name == BASE_ADAPTER else owner
            weights = self._weights[folder] = _Weights(version, key)
        self._weights.move_to_end(folder)
        weights.num_asking += 1
        try:
            async with weights.entering:
                if weights.num_answering and self._is_turn_over(weights):
                    await weights.is_idle.wait()
                if not weights.num_answering:
                    await self._places.take(weights.key)
                    weights.turn_ends_at = monotonic() + TURN_S
                weights.num_answering += 1
                weights.is_idle.clear()
                try:
                    if weights.engine is None:
                        await self._close_idle()
                        weights.engine = await self._open(folder, weights.version)
                    return weights, weights.engine
                except BaseException:
                    self._end_answer(weights)
                    raise
        except BaseException:
            self._forget(folder, weights)
            raise

    async def _open(self, folder: Path, version: Version) -> ContinuousEngine:
        engine = self._root.share()
        try:
            await engine.load(folder, version)
        except BaseException:
            await asyncio.shield(engine.close())
            raise
        return engine

    def _is_turn_over(self, weights: _Weights) -> bool:
        return bool(self._places.num_waiting) and monotonic() >= weights.turn_ends_at

    def _leave(self, folder: Path, weights: _Weights) -> None:
        self._end_answer(weights)
        self._forget(folder, weights)

    def _end_answer(self, weights: _Weights) -> None:
        weights.num_answering -= 1
        if not weights.num_answering:
            weights.is_idle.set()
            self._places.release(weights.key)

    def _forget(self, folder: Path, weights: _Weights) -> None:
        weights.num_asking -= 1
        if not weights.num_asking and weights.engine is None:
            del self._weights[folder]

    async def _close_idle(self) -> None:
        """As many stay as may answer, those that answered last."""
        idle = [
            (folder, one, one.engine)
            for folder, one in self._weights.items()
            if one.engine is not None and not one.num_answering
        ]
        oldest = idle[: max(0, len(idle) - MAX_LOADED)]
        for folder, one, _ in oldest:
            one.engine = None
            if not one.num_asking:
                del self._weights[folder]
        # None is known before the first is closed: who asks for one meanwhile loads it again.
        await asyncio.shield(asyncio.gather(*(engine.close() for _, _, engine in oldest)))


def question_of(body: Sample, window: int, vocab_size: int) -> Question:
    """Raises BadRequest for what the model cannot answer."""
    ids = _prompt_ids(body)
    if not ids or max(ids) >= vocab_size:
        raise BadRequest(f"a prompt has tokens 0 to {vocab_size - 1}, at least one")
    last_n = len(ids) if body.prompt_logprobs_last_n is None else body.prompt_logprobs_last_n
    return Question(
        prompt=token_ids(ids),
        spec=_spec(body, window - len(ids)),
        seed=body.sampling_params.seed,
        stop_ids=_stop_ids(body),
        num_samples=body.num_samples,
        scores_from=max(0, len(ids) - last_n) if body.prompt_logprobs else None,
    )


def _prompt_ids(body: Sample) -> list[int]:
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
    max_tokens = min(params.max_tokens or room, room)
    if body.num_samples * max_tokens > MAX_RESULT_TOKENS:
        raise BadRequest(
            f"{body.num_samples} answers of up to {max_tokens} tokens: a request has up to "
            f"{MAX_RESULT_TOKENS}; lower max_tokens, or send several requests"
        )
    stops = [params.stop] if isinstance(params.stop, str) else params.stop or []
    fields = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(0, params.top_k),
        "max_tokens": max_tokens,
        "stop": [stop for stop in stops if isinstance(stop, str)],
    }
    try:
        spec = msgspec.convert(fields, SamplingSpec)
    except msgspec.ValidationError as error:
        raise BadRequest(f"sampling_params: {error}") from None
    check_spec(spec)
    return spec


def _stop_ids(body: Sample) -> frozenset[int]:
    stop = body.sampling_params.stop
    return frozenset(one for one in stop or () if isinstance(one, int))


def _sampled(found: Completion, stop_ids: frozenset[int]) -> Sampled:
    """Cut after the first stop token: what comes before it was drawn without knowing of it."""
    tokens, logprobs = view_ids(found.sampled_ids), view_log_probs(found.logprobs)
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), None)
    is_cut = end is None and found.finish is not FinishReason.STOP
    return Sampled(tokens=tokens[:end], logprobs=logprobs[:end], is_cut=is_cut)
