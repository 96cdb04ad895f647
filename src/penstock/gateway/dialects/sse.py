# SPDX-License-Identifier: Apache-2.0
"""Encoding of server-sent events, shared by all dialects."""

from __future__ import annotations

from penstock.types import JsonObject
from penstock.wire.codec import encode_json

_LINE_SEPARATORS = tuple(
    (end.encode(), f"\\u{ord(end):04x}".encode()) for end in "\x85\u2028\u2029"
)
"""Not line ends in the SSE standard, but clients that split lines like Python (such as httpx) treat
them as such."""


def sse_event(body: JsonObject, kind: str = "") -> bytes:
    data = encode_json(body)
    if not data.isascii():
        for end, escaped in _LINE_SEPARATORS:
            data = data.replace(end, escaped)
    name = b"event: " + kind.encode() + b"\n" if kind else b""
    return name + b"data: " + data + b"\n\n"
