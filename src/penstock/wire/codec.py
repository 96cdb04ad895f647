# SPDX-License-Identifier: Apache-2.0
"""Bytes to typed records and back: msgpack between services, JSON for people. Nothing is ever
unpickled."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from penstock.errors import BadRequest

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


def encode_json(value: object) -> bytes:
    return _json_encoder.encode(value)


def decode(data: bytes | memoryview, kind: type[T], *, media_type: str = MSGPACK) -> T:
    """A value of exactly this type, or BadRequest naming the field that does not fit."""
    decoder = _json_decoder(kind) if media_type.startswith(JSON) else _decoder(kind)
    try:
        value = decoder.decode(data)
        if media_type.startswith(JSON):
            _encoder.encode(value)  # JSON knows integers that no other part of penstock does
        return value
    except OverflowError:
        raise BadRequest(f"body is no valid {kind.__name__}: an integer exceeds 64 bits") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"body is no valid {kind.__name__}: {error}") from None
