# SPDX-License-Identifier: Apache-2.0
"""Lines of a program in a sandbox, each bounded; a byte costs the same however the program cuts its
output into pieces."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from penstock.rollout.sandbox.types import ReadStream

_CHUNK_BYTES = 1 << 16


async def read_lines(source: ReadStream, max_bytes: int) -> AsyncGenerator[bytes]:
    """Lines without their ends, and without a last one that has none. Raises ValueError for one
    that is longer."""
    rest = bytearray()
    while chunk := await source.read(_CHUNK_BYTES):
        *lines, end = chunk.split(b"\n")
        for line in lines:
            yield bytes(rest) + line
            rest.clear()
        rest += end
        if len(rest) > max_bytes:
            raise ValueError(f"a line of more than {max_bytes >> 20} MiB")
