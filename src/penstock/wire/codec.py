# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes typed records: msgpack between services, JSON for people. Never pickle."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from penstock.errors import BadRequest
from penstock.redaction import excerpt

T = TypeVar("T")

MSGPACK = "application/msgpack"
JSON = "application/json"

_encoder = msgspec.msgpack.Encoder()
_json_encoder = msgspec.json.Encoder()


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def encode(value: object) -> bytes:
    return _encoder.encode(value)


def encoded_bytes(value: object) -> int:
    """The size of a value on the wire and in a row, all its fields included."""
    return len(encode(value))


def encode_json(value: object) -> bytes:
    return _json_encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T], *, media_type: str = MSGPACK) -> T:
    """A value of exactly this type, or BadRequest naming the invalid field."""
    is_json = media_type.startswith(JSON)
    return _decode(_json_decoder(kind) if is_json else _decoder(kind), data, kind, is_json=is_json)


def decode_zero_copy(data: bytes | memoryview, kind: type[T]) -> T:
    """Like `decode`, for reading a large msgpack record: byte fields are views of `data` instead of
    copies. Returns generated classes with the same fields but without methods."""
    return _decode(_decoder(_view_type(kind)), data, kind)


def _decode(decoder: Any, data: bytes | memoryview, kind: type[T], *, is_json: bool = False) -> T:
    try:
        value = decoder.decode(data)
        if is_json:
            _encoder.encode(value)  # JSON allows integers that msgpack cannot represent
        return value
    except OverflowError:
        raise BadRequest(f"invalid {kind.__name__} in body: an integer exceeds 64 bits") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        said = excerpt(str(error), 150, 150)  # it repeats a value that it does not know
        raise BadRequest(f"invalid {kind.__name__} in body: {said}") from None


@cache
def _view_type(kind: Any) -> Any:
    """The type with `bytes` replaced by `memoryview`; unchanged if it has none."""
    bare = getattr(kind, "__supertype__", kind)
    if bare is bytes:
        return memoryview
    if get_origin(bare) is Annotated:
        inner, *bounds = get_args(bare)
        view = _view_type(inner)
        return kind if view == inner else Annotated[view, *bounds]
    if get_origin(kind) is tuple:
        return tuple[tuple(part if part is ... else _view_type(part) for part in get_args(kind))]
    if not dataclasses.is_dataclass(kind):
        return kind
    hints = get_type_hints(kind, include_extras=True)
    view_types = {field.name: _view_type(hints[field.name]) for field in dataclasses.fields(kind)}
    if view_types == {name: hints[name] for name in view_types}:
        return kind
    fields = [
        (field.name, view_types[field.name], *_default(field)) for field in dataclasses.fields(kind)
    ]
    return msgspec.defstruct("View", fields, frozen=True, kw_only=True)


def _default(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The default of this field, as a third part of its definition; empty if it has none."""
    if field.default_factory is not dataclasses.MISSING:
        return (msgspec.field(default_factory=field.default_factory),)
    return () if field.default is dataclasses.MISSING else (field.default,)
