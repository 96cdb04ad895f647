# SPDX-License-Identifier: Apache-2.0
"""What the Tinker SDK (0.25 and newer) sends and reads: protobuf for tensors, JSON for the rest.

Owns the fields of both and their bounds. The messages are declared here by the numbers of their
fields, without generated code. Refuses images, audio and sparse tensors. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from msgspec import Meta

from penstock.bounds import Label
from penstock.errors import BadRequest
from penstock.wire.codec import JSON, decode

PROTOBUF = "application/x-protobuf"
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
MAX_NAME_CHARS = 256
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
Number = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]

_KINDS = {"double": 1, "float": 2, "int64": 3, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
_REPEATED, _OPTIONAL, _MESSAGE = 3, 1, 11
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "Text": {"tokens": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "Text"), "image": (2, "bytes"), "dmel": (3, "bytes")},
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "bytes"),
        "dtype": (3, "int32"),
        "shape": (4, "int64*"),
    },
    "NamedTensor": {"key": (1, "string"), "value": (2, "Tensor")},
    "NamedNumber": {"key": (1, "string"), "value": (2, "double")},
    "Setting": {"number": (1, "double"), "text": (2, "string")},
    "NamedSetting": {"key": (1, "string"), "value": (2, "Setting")},
    "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "NamedTensor*")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum*"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "NamedNumber*"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "NamedSetting*"),
    },
    "RequestParts": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "bytes*"),
        "loss_fn": (4, "string"),
        "loss_fn_config": (5, "bytes*"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "bytes*"),
    },
    "DatumParts": {"model_input": (1, "bytes*"), "loss_fn_inputs": (2, "bytes*")},
    "Batched": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32")},
    "NamedBatched": {"key": (1, "string"), "value": (2, "Batched")},
    "ArrayRecord": {
        "type_tag": (1, "string"),
        "fields": (2, "NamedBatched*"),
        "num_datums": (3, "int64"),
    },
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "ArrayRecord*"),
        "metrics": (3, "NamedNumber*"),
    },
    "Sequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes")},
    "SampleResponse": {"sequences": (1, "Sequence*"), "prompt_logprobs": (2, "bytes")},
}
"""Fields by number; `*` for repeated ones. A map is a repeated pair of key and value. What has
`Parts` is the same message with its parts unread: a part of two bytes costs a hundred once it is
read, so they are counted first."""
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_DTYPES = {_FLOAT32: np.float32, _INT64: np.int64, _INT32: np.int32}
_MAX_DATA = 4096
_MAX_PARTS = 64
"""Chunks, inputs or settings of a request or a datum."""
_MAX_PARTS_OF_ALL = 8 * _MAX_DATA
"""Of all data of a request; the SDK sends two to five for each."""
_MAX_DIMENSIONS = 8
_MAX_OBJECTS = 8192
_MAX_COMMAS = 64 << 10
"""Of a sampling request, beside those between its tokens."""


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="penstock_tinker.proto", package="penstock.tinker", syntax="proto3"
    )
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, declared) in fields.items():
            kind = declared.removesuffix("*")
            one: Any = message.field.add(name=field, number=number)
            one.label = _REPEATED if declared.endswith("*") else _OPTIONAL
            one.type = _KINDS.get(kind, _MESSAGE)
            if kind not in _KINDS:
                one.type_name = f".penstock.tinker.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"penstock.tinker.{name}"))
        for name in _MESSAGES
    }


MESSAGES = _classes()
"""The class of each message, by name."""


# --- forward and backward passes --------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence: the tokens that the model reads, and what the loss reads for each of them."""

    tokens: Ints
    inputs: Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward:
    model_id: str
    number: int
    """Its place among the requests of the model."""
    loss: str
    settings: Mapping[str, float]
    data: Sequence[Datum]
    is_forward_only: bool


def read_forward_backward(body: bytes) -> ForwardBackward:
    """Raises BadRequest."""
    found = _parse("RequestParts", body)
    if not 0 < len(found.model_id) <= MAX_NAME_CHARS or found.seq_id < 1:
        raise BadRequest(
            f"a forward_backward request names its model, in up to {MAX_NAME_CHARS} characters, "
            "and its number among the model's requests, from 1"
        )
    _check_name("loss_fn", found.loss_fn)
    if not 0 < len(found.data) <= _MAX_DATA:
        raise BadRequest(f"a request has 1 to {_MAX_DATA} data, this one {len(found.data)}")
    _check_num_parts("a request", len(found.loss_fn_config) + len(found.loss_fn_config_v2))
    settings: dict[str, float] = {}
    for part in found.loss_fn_config:
        pair = _parse("NamedNumber", part)
        _check_name("loss_fn_config", pair.key)
        settings[pair.key] = pair.value
    for part in found.loss_fn_config_v2:
        pair = _parse("NamedSetting", part)
        _check_name("loss_fn_config", pair.key)
        if pair.value.text:
            raise BadRequest(f"loss_fn_config {pair.key!r}: this server has only numbers there")
        settings[pair.key] = pair.value.number
    return ForwardBackward(
        model_id=found.model_id,
        number=found.seq_id,
        loss=found.loss_fn,
        settings=settings,
        data=_data(found.data),
        is_forward_only=found.forward_only,
    )


def _parse(kind: str, content: bytes) -> Any:
    found = MESSAGES[kind]()
    try:
        found.ParseFromString(content)
    except DecodeError as error:
        raise BadRequest(f"the body is not a forward_backward request: {error}") from None
    return found


def _check_num_parts(where: str, number: int) -> None:
    if number > _MAX_PARTS:
        raise BadRequest(f"{where} has up to {_MAX_PARTS} chunks, inputs or settings, not {number}")


def _check_name(where: str, name: str) -> None:
    """Names are repeated in errors."""
    if len(name) > MAX_NAME_CHARS:
        raise BadRequest(f"a name in {where} has up to {MAX_NAME_CHARS} characters")


def _data(contents: Sequence[bytes]) -> list[Datum]:
    found: list[Any] = []
    num_parts = 0
    for content in contents:
        found.append(one := _parse("DatumParts", content))
        _check_num_parts("a datum", number := len(one.model_input) + len(one.loss_fn_inputs))
        if (num_parts := num_parts + number) > _MAX_PARTS_OF_ALL:
            raise BadRequest(f"the data have up to {_MAX_PARTS_OF_ALL} chunks and inputs together")
    return [_datum(one) for one in found]


def _datum(found: Any) -> Datum:
    parts: list[npt.NDArray[np.int32]] = []
    for part in found.model_input:
        chunk = _parse("Chunk", part)
        if chunk.image or chunk.dmel:
            raise BadRequest("model_input has an image or audio; this server takes tokens only")
        parts.append(_array(chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not tokens.size:
        raise BadRequest("a datum without tokens; every model_input needs at least one")
    named = [_parse("NamedTensor", part) for part in found.loss_fn_inputs]
    for pair in named:
        _check_name("loss_fn_inputs", pair.key)
    inputs = {pair.key: _tensor(pair.key, pair.value) for pair in named}
    for name, values in inputs.items():
        if values.shape != tokens.shape:
            raise BadRequest(
                f"loss_fn_inputs[{name!r}] has shape {values.shape}; it needs one number for each "
                f"of the {tokens.size} tokens of model_input"
            )
        if not np.isfinite(values).all():
            raise BadRequest(f"loss_fn_inputs[{name!r}] has numbers that are not finite")
    return Datum(tokens=tokens, inputs=inputs)


def _tensor(name: str, found: Any) -> npt.NDArray[Any]:
    if found.sparse_csr:
        raise BadRequest(f"loss_fn_inputs[{name!r}] is sparse; this server takes dense tensors")
    dtype = _DTYPES.get(found.dtype)
    if dtype is None:
        raise BadRequest(f"loss_fn_inputs[{name!r}] has dtype {found.dtype}; send float32 or int64")
    values = _array(found.dense, dtype)
    if len(found.shape) > _MAX_DIMENSIONS:
        raise BadRequest(f"loss_fn_inputs[{name!r}] has {len(found.shape)} dimensions")
    shape = tuple(found.shape) or values.shape
    if math.prod(shape) != values.size or min(shape) < 0 or max(shape) > values.size:
        raise BadRequest(f"loss_fn_inputs[{name!r}] has {values.size} numbers for shape {shape}")
    return values.reshape(shape)


def _array(content: bytes, dtype: Any) -> npt.NDArray[Any]:
    if len(content) % np.dtype(dtype).itemsize:
        raise BadRequest(f"{len(content)} bytes are no array of {np.dtype(dtype).name}")
    return np.frombuffer(content, dtype)


def write_outputs(logprobs: Sequence[Floats], metrics: Mapping[str, float]) -> bytes:
    """The answer to a forward or backward pass: log-probs by token of each datum."""
    answer = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    record = answer.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    values = record.fields.add(key="logprobs").value
    ends = np.cumsum([0, *(one.size * 4 for one in logprobs)], dtype=np.int64)
    values.data, values.offsets, values.dtype = (
        np.concatenate(logprobs).astype(np.float32).tobytes(),
        ends.tobytes(),
        _FLOAT32,
    )
    for name, value in metrics.items():
        answer.metrics.add(key=name, value=value)
    return answer.SerializeToString()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    tokens: Sequence[int]
    logprobs: Sequence[float]
    is_cut: bool
    """Whether it reached `max_tokens` before its end."""


def write_samples(sequences: Sequence[Sampled], prompt_logprobs: Floats | None) -> bytes:
    answer = MESSAGES["SampleResponse"]()
    for one in sequences:
        answer.sequences.add(
            stop_reason=int(one.is_cut),
            tokens=np.asarray(one.tokens, np.int32).tobytes(),
            logprobs=np.asarray(one.logprobs, np.float32).tobytes(),
        )
    if prompt_logprobs is not None:
        answer.prompt_logprobs = prompt_logprobs.astype(np.float32).tobytes()
    return answer.SerializeToString()


# --- JSON --------------------


class CreateSession(msgspec.Struct, frozen=True, kw_only=True):
    tags: Annotated[list[str], Meta(max_length=256)] = []


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    session_id: Name


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    rank: Annotated[int, Meta(ge=1, le=1024)]
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    """Of no effect where the head's weights are the embedding's."""


class Optimizer(msgspec.Struct, frozen=True, kw_only=True):
    type: Name = "adamw"


class CreateModel(msgspec.Struct, frozen=True, kw_only=True):
    session_id: Name
    model_seq_id: Number
    base_model: Name
    lora_config: Lora | None = None
    optimizer_config: Optimizer = Optimizer()

    @property
    def lora(self) -> Lora:
        return self.lora_config or Lora(rank=32)


class Adam(msgspec.Struct, frozen=True, kw_only=True):
    learning_rate: Annotated[float, Meta(ge=0, le=1e3)] = 1e-4
    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Meta(ge=0, le=1)] = 1e-12
    weight_decay: Annotated[float, Meta(ge=0, le=1e3)] = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=0)] = 0.0
    """0: no clipping."""


class OptimStep(msgspec.Struct, frozen=True, kw_only=True):
    model_id: Name
    seq_id: Number
    adam_params: Adam


class LoadWeights(msgspec.Struct, frozen=True, kw_only=True):
    path: Name
    optimizer: bool
    model_id: Name | None = None
    seq_id: Number | None = None
    session_id: Name | None = None
    model_seq_id: Number | None = None


class SaveWeights(msgspec.Struct, frozen=True, kw_only=True):
    model_id: Name
    seq_id: Number
    path: Name | None = None
    overwrite: bool = False
    ttl_seconds: Annotated[int, Meta(ge=1)] | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"


class CreateSamplingSession(msgspec.Struct, frozen=True, kw_only=True):
    session_id: Name
    sampling_session_seq_id: Number
    base_model: Name | None = None
    model_path: Name | None = None


class PromptChunk(msgspec.Struct, frozen=True, kw_only=True):
    tokens: Annotated[list[TokenId], Meta(max_length=4 << 20)]
    """As many as a body holds; together at most the model's window."""
    type: Name = "encoded_text"


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    chunks: Annotated[list[PromptChunk], Meta(max_length=4096)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    max_tokens: Annotated[int, Meta(ge=1, lt=1 << 31)] | None = None
    seed: int | None = None
    stop: Label | Annotated[list[Label | TokenId], Meta(max_length=64)] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    prompt: Prompt
    sampling_params: SamplingParams
    num_samples: Annotated[int, Meta(ge=1, le=1024)] = 1
    sampling_session_id: Name
    seq_id: Annotated[int, Meta(ge=0, lt=1 << 62)]
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_logprobs: msgspec.Raw | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    record_stability_info: bool | None = None


def read_sample(content: bytes, window: int) -> Sample:
    """window: of the model. Raises BadRequest. Parts are counted first: while a body is decoded, no
    thread runs."""
    if content.count(b"{") > _MAX_OBJECTS:
        raise BadRequest(f"a sampling request has up to {_MAX_OBJECTS} objects")
    if content.count(b",") > window + _MAX_COMMAS:
        raise BadRequest(f"the prompt is too long for the model's window, {window} tokens")
    return decode(content, Sample, media_type=JSON)


class Retrieve(msgspec.Struct, frozen=True, kw_only=True):
    request_id: Annotated[str, Meta(min_length=1, max_length=512)]


class ModelQuery(msgspec.Struct, frozen=True, kw_only=True):
    model_id: Name


class Path(msgspec.Struct, frozen=True, kw_only=True):
    tinker_path: Name


class Future(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What every request is answered with; its result is fetched by `retrieve_future`."""

    request_id: str
    model_id: str | None = None
    sample_sequence_ids: list[str] | None = None


class Anything(msgspec.Struct, frozen=True):
    """A JSON object that is not read."""
