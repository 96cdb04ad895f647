# SPDX-License-Identifier: Apache-2.0
"""Builds request bodies for vLLM's generate route, and parses its full or streamed responses.

No connection, no clock. A whole answer of a server with our plugin is numbers in a row
(`plugin/penstock_answers`); any other one has an object for each token. vLLM reports the versions
of an answer only with its last token, so an earlier chunk gets the version that is live when the
chunk is read. The completion has vLLM's own spans.
"""

from __future__ import annotations

import binascii
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import structlog

from penstock.errors import EngineError, RequestRejected
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.rollout.engine import SpanLog
from penstock.rollout.engines.vllm.expert_choices import read_experts
from penstock.rollout.snapshot import Snapshot, prompt_problem
from penstock.types import FinishReason, KvAge, LogProbs, TokenIds, Version, VersionSpan

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 2.0
"""vLLM silently raises lower temperatures to the minimum, and rejects higher ones."""
NO_LOGPROB = -9999.0
"""vLLM's value for a log-prob that is NaN or infinite."""
BROKEN = (
    "vLLM's log-probs are NaN or do not match its tokens, so the snapshot is broken; check the "
    "trainer's loss before this version"
)
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
log = structlog.get_logger(__name__)


class _LogProb(msgspec.Struct, gc=False):
    token_id: int
    logprob: float


class _LogProbs(msgspec.Struct, gc=False):
    content: list[_LogProb]


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    token_ids: list[int] | None = None
    logprobs: _LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None
    packed: str = ""


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    error: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_Chunk)


def _check_fit(request: GenerationRequest, snapshot: Snapshot) -> None:
    """Reject requests that vLLM would reject, or change silently."""
    if (why := prompt_problem(request.prompt_ids, snapshot)) is not None:
        raise RequestRejected(why)
    temperature = request.sampling.temperature
    if temperature and not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        raise RequestRejected(
            f"temperature {temperature:g} is not supported by vLLM; set 0, or a value from "
            f"{MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
        )


def request_body(
    request: GenerationRequest, snapshot: Snapshot, salt: Version, *, model: str = ""
) -> bytes:
    """`model` names an adapter. The prefix caches of different salts are separate. The only stop
    conditions are the end ids of the snapshot and the spec's strings, kept in the answer."""
    _check_fit(request, snapshot)
    prompt_ids, sampling = request.prompt_ids, request.sampling
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "max_tokens": min(sampling.max_tokens, snapshot.window - len(prompt_ids)),
        "stop_token_ids": sorted(snapshot.stop_ids),
        "logprobs": 0,
        "ignore_eos": not sampling.json_schema,
        "detokenize": bool(sampling.stop),
    }
    if sampling.stop:
        params |= {"stop": list(sampling.stop), "include_stop_str_in_output": True}
        params |= {"skip_special_tokens": False}
    if request.on_chunk is None:
        params["extra_args"] = {"penstock_packed": True}
    if sampling.json_schema:
        params["structured_outputs"] = {"json": sampling.json_schema}
    call: dict[str, Any] = {
        "token_ids": list(prompt_ids),
        "sampling_params": params,
        # without `@`, which vLLM does not allow here
        "cache_salt": f"{salt.policy}.{salt.incarnation}.{salt.number}",
        "stream": request.on_chunk is not None,
    }
    if model:
        call["model"] = model
    return msgspec.json.encode(call)


class CompletionParser:
    def __init__(
        self,
        serving: Callable[[], Version],
        request: GenerationRequest,
        kv: KvAge | None = None,
        *,
        num_experts: int = 0,
    ) -> None:
        """`serving` returns the version of a chunk; it is called when the chunk is read. `kv`: how
        old the keys and values of the answer may be. num_experts: of each layer, if expert choices
        are recorded."""
        self._num_experts = num_experts
        self._num_prompt = len(request.prompt_ids)
        self._routed: str | None = None
        self._serving = serving
        self._kv = kv
        self._session = request.session
        self._on_chunk = request.on_chunk
        self._rest = b""
        self._ids = array("i")
        self._logprobs = array("f")
        self._finish: str | None = None
        self._spans: list[_Span] | None = None
        self._streamed_spans = SpanLog(serving())

    def feed(self, data: bytes) -> None:
        """Add bytes of an event stream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self.feed_event(line[6:])

    def feed_event(self, text: bytes) -> None:
        """Add one event, or the body of a full response."""
        try:
            chunk = _DECODER.decode(text)
        except msgspec.DecodeError as error:
            raise EngineError(f"cannot parse vLLM's response: {error}; use vLLM 0.32") from None
        if bytes(chunk.error) not in (b"", b"null"):
            raise EngineError(f"vLLM aborted an answer: {bytes(chunk.error).decode()[:500]}")
        for choice in chunk.choices:
            self._add_choice(choice)

    def _add_choice(self, choice: _Choice) -> None:
        if choice.finish_reason is not None:
            self._finish, self._spans = choice.finish_reason, choice.weight_versions
            self._routed = choice.routed_experts
        if choice.packed:
            self._add_packed(choice.packed)
        elif choice.token_ids:
            self._add_tokens(choice.token_ids, choice.logprobs.content if choice.logprobs else [])

    def _add_packed(self, packed: str) -> None:
        try:
            data = binascii.a2b_base64(packed, strict_mode=True)
            ids, logprobs = np.frombuffer(data, "<i4").reshape(2, -1)
        except ValueError as error:
            raise EngineError(f"cannot read vLLM's packed answer: {error}") from None
        logprobs = logprobs.view("<f4")
        if not logprobs.min(initial=0.0) > NO_LOGPROB or ids.min(initial=0) < 0:
            raise EngineError(BROKEN)
        self._ids.frombytes(ids.tobytes())
        self._logprobs.frombytes(np.minimum(logprobs, 0.0).tobytes())

    def _add_tokens(self, ids: list[int], entries: list[_LogProb]) -> None:
        logprobs = [min(entry.logprob, 0.0) for entry in entries]
        is_paired = [entry.token_id for entry in entries] == ids
        if not is_paired or min(logprobs) <= NO_LOGPROB or not 0 <= min(ids) <= max(ids) < 1 << 31:
            raise EngineError(BROKEN)
        if self._on_chunk is not None:
            version = self._serving()
            self._streamed_spans.switch(len(self._ids), version)
            chunk = TokenChunk(sampled_ids=ids, logprobs=logprobs, version=version, kv=self._kv)
            self._on_chunk(chunk)
        self._ids.extend(ids)
        self._logprobs.extend(logprobs)

    @property
    def is_streamed(self) -> bool:
        return self._on_chunk is not None

    def completion(self, versions: Mapping[str, Version]) -> Completion:
        """The completion; `versions` maps labels to all versions the server has ever served."""
        finish = FINISHES.get(self._finish or "")
        if finish is None:
            raise EngineError(f"vLLM returned finish reason {self._finish or 'none'!r}")
        spans = [_span(span, versions) for span in self._spans or ()]
        starts = [0, *(span.end for span in spans)]
        if [*(span.start for span in spans), len(self._ids)] != starts:
            raise EngineError(
                f"vLLM's version spans {spans} do not cover the {len(self._ids)} tokens of the "
                "answer; use vLLM 0.32 or later"
            )
        if self.is_streamed:
            streamed = self._streamed_spans.spans(len(self._ids))
            if [span.start for span in streamed] != [span.start for span in spans]:
                log.warning("streamed versions differ from final spans", session=self._session)
        num_tokens = self._num_prompt + len(self._ids)
        return Completion(
            sampled_ids=TokenIds(self._ids.tobytes()),
            logprobs=LogProbs(self._logprobs.tobytes()),
            spans=tuple(spans),
            finish=finish,
            kv=self._kv,
            experts=read_experts(self._routed, self._num_experts, num_tokens)
            if self._num_experts
            else None,
        )


def _span(span: _Span, versions: Mapping[str, Version]) -> VersionSpan:
    version = versions.get(span.version)
    if version is None:
        raise EngineError(
            f"vLLM sampled tokens with weights {span.version!r}, which this node never loaded; "
            "nodes cannot share a vLLM server"
        )
    return VersionSpan(
        start=span.start, end=span.end, incarnation=version.incarnation, number=version.number
    )
