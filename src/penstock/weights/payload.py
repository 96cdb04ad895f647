# SPDX-License-Identifier: Apache-2.0
"""The record of one encoded change, and its streams through zstd.

Owns the names of kinds and roles and the bound on unpacking: a stream never takes more memory than
it declared, and whoever unpacks it has checked that number first. Knows not what streams mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
import zstandard

from penstock.errors import WeightsError
from penstock.weights.symbols import Bytes

ZSTD_LEVEL = 1

Data = bytes | memoryview


class Kind(StrEnum):
    SAME = "same"
    """No bit changed; no streams."""
    SPARSE = "sparse"
    """Changed elements only; its streams unpacked take no more than the tensor."""
    FULL = "full"
    """All bytes of the tensor."""


class Role(IntEnum):
    """What a stream holds. Where there are several of a role, the lowest digits come first."""

    GAPS = 0
    """Unchanged elements before each changed one, without the digits, at most 255."""
    FAR = 1
    """A byte plane of what gaps of 255 lack."""
    DIGITS = 2
    """The lowest two bits of every gap, or the next two; four to a byte."""
    CODES = 3
    """Zigzag differences minus one, at most 3; four to a byte."""
    BIG = 4
    """A byte plane of what codes of 3 lack."""
    VALUES = 5
    """A byte plane of the new values; instead of codes."""
    WHOLE = 6
    """The tensor's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    role: Role
    num_bytes: int
    """Unpacked."""
    data: Data
    """A zstd frame if shorter than `num_bytes`, else the bytes themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    kind: Kind
    num_changed: int
    """Elements of a sparse payload; 0 for the other kinds."""
    streams: tuple[Stream, ...]

    @property
    def size(self) -> int:
        return sum(len(stream.data) for stream in self.streams)


def pack(role: Role, raw: Bytes | memoryview) -> Stream:
    plain = raw if isinstance(raw, memoryview) else raw.data
    return Stream(role=role, num_bytes=len(plain), data=compress(plain))


def pack_pieces(role: Role, pieces: Sequence[Bytes]) -> Stream:
    """One stream of many pieces that are not copied together first."""
    num_bytes = sum(map(len, pieces))
    squeezing = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(size=num_bytes)
    packed = b"".join([*(squeezing.compress(piece.data) for piece in pieces), squeezing.flush()])
    data = packed if len(packed) < num_bytes else np.concatenate(pieces).data
    return Stream(role=role, num_bytes=num_bytes, data=data)


def unpack(stream: Stream) -> Bytes:
    """Exactly the declared bytes; check that `num_bytes` may be taken before calling this."""
    where = f"delta stream {stream.role.name.lower()}"
    return np.frombuffer(decompress(stream.data, stream.num_bytes, where), np.uint8)


def compress(raw: memoryview) -> Data:
    """Shorter than before, or as it was: the length is what tells the two apart."""
    return min(raw, zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw), key=len)


def decompress(data: Data, num_bytes: int, where: str) -> Data:
    if len(data) == num_bytes:
        return data
    if len(data) > num_bytes:
        raise WeightsError(f"{where}: {len(data)} bytes for {num_bytes}; the delta is damaged")
    try:
        # zstd takes the frame's own word for its size before any limit of ours.
        declared = zstandard.frame_content_size(data)
        if declared != num_bytes:
            raise WeightsError(f"{where}: its zstd frame is of {declared} bytes, not {num_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=num_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise WeightsError(f"{where} is damaged: {error}") from None
    if len(raw) != num_bytes:
        raise WeightsError(f"{where} unpacks to {len(raw)} bytes, not {num_bytes}")
    return raw
