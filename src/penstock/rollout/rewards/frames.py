# SPDX-License-Identifier: Apache-2.0
"""Messages between a node and its reward worker: length-prefixed msgpack frames over two pipes."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from penstock.types import JsonObject

PREFIX_BYTES = 4
MAX_ANSWER_BYTES = 1 << 20
"""A batch has at most 256 values, and every text in an answer is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    completions: list[str]
    payloads: list[JsonObject]
    """The task payload of each completion; its keys become columns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreAnswer:
    """Also the worker's first message after the import: no values, and the error if it failed."""

    values: list[float | str] = field(default_factory=list[float | str])
    """One per completion: its reward, or a description of what the function returned instead."""
    error: str = ""
    """The user's traceback if the function raised, or the problem with its return value."""


def pack(message: ScoreRequest | ScoreAnswer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def frame_bytes(prefix: bytes) -> int:
    return int.from_bytes(prefix, "little")


REQUESTS = msgspec.msgpack.Decoder(ScoreRequest)
ANSWERS = msgspec.msgpack.Decoder(ScoreAnswer)
