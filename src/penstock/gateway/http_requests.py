# SPDX-License-Identifier: Apache-2.0
"""Reads the key and the body of a gateway request."""

from __future__ import annotations

from starlette.requests import Request

from penstock.errors import TooLarge


def read_key(request: Request) -> str:
    """The bearer token, or Anthropic's `x-api-key` header; empty if there is neither."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The complete body; raises TooLarge, before reading if the declared length is too large."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    is_too_large = declared.isdigit() and int(declared) > max_bytes
    if not is_too_large:
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                is_too_large = True
                break
    if is_too_large:
        raise TooLarge(f"request body exceeds the limit of {max_bytes} bytes; send a shorter one")
    return bytes(body)
