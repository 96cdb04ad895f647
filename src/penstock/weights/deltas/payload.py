# SPDX-License-Identifier: Apache-2.0
"""Record of one encoded change, and zstd compression of its streams.

Owns kinds, roles and the limit on unpacking: a stream never takes more memory than declared, and
the caller checks the declared size first. Does not interpret streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum

import numpy as np
import zstandard

from penstock.errors import WeightsError
from penstock.weights.deltas.numpy_kernels import WINDOW_BYTES, Bits, Bytes, split_planes

ZSTD_LEVEL = 1
WHOLE_STEP_BYTES = 1 << 20

Data = bytes | memoryview


class Kind(StrEnum):
    SAME = "same"
    """No bit changed; no streams."""
    SPARSE = "sparse"
    """Changed elements only; its unpacked streams are no larger than the tensor."""
    FULL = "full"
    """All bytes of the tensor."""


class Role(IntEnum):
    """Content of a stream. Several streams of one role are ordered from the lowest bits up."""

    GAPS = 0
    """Number of unchanged elements before each changed one, without the split-off low bits, at most
    255."""
    LONG_GAPS = 1
    """A byte plane of the remainders of gaps of 255."""
    LOW_BITS = 2
    """The lowest two bits of every gap, or the next two; packed four to a byte."""
    CODES = 3
    """Zigzag differences minus one, at most 3; packed four to a byte."""
    LARGE_CODES = 4
    """A byte plane of the remainders of codes of 3."""
    VALUES = 5
    """A byte plane of the new values, instead of codes."""
    FULL = 6
    """The tensor's bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    role: Role
    num_bytes: int
    """Unpacked size."""
    data: Data
    """A zstd frame if shorter than `num_bytes`, otherwise the raw bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    kind: Kind
    num_changed: int
    """Changed elements of a sparse payload; 0 for other kinds."""
    streams: tuple[Stream, ...]

    @property
    def size(self) -> int:
        return sum(len(stream.data) for stream in self.streams)

    @property
    def num_unpacked(self) -> int:
        return sum(stream.num_bytes for stream in self.streams)


def pack(role: Role, raw: Bytes | memoryview) -> Stream:
    plain = raw if isinstance(raw, memoryview) else raw.data
    return Stream(role=role, num_bytes=len(plain), data=compress(plain))


class Packer:
    """Packs one stream incrementally, without keeping its pieces."""

    def __init__(self, role: Role, num_bytes: int) -> None:
        self._role = role
        self._num_bytes = num_bytes
        self._compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(size=num_bytes)
        self._packed = bytearray()
        self._waiting: list[Bytes] = []
        self._num_waiting = 0

    def add(self, piece: Bytes) -> None:
        self._waiting.append(piece)
        self._num_waiting += len(piece)
        if self._num_waiting >= WINDOW_BYTES:
            self._compress_pending()

    def finish(self) -> Stream:
        if not self._packed and self._num_waiting == self._num_bytes:
            return pack(self._role, np.concatenate([*self._waiting, np.empty(0, np.uint8)]))
        self._compress_pending()
        self._packed += self._compressor.flush()
        data: Data = memoryview(self._packed)
        self._packed = bytearray()
        if len(data) >= self._num_bytes:  # incompressible: store the raw bytes, which it contains
            data = zstandard.ZstdDecompressor().decompress(data, max_output_size=self._num_bytes)
        return Stream(role=self._role, num_bytes=self._num_bytes, data=data)

    def _compress_pending(self) -> None:
        if self._waiting:
            self._packed += self._compressor.compress(np.concatenate(self._waiting).data)
            self._waiting, self._num_waiting = [], 0


def pack_pieces(role: Role, num_bytes: int, pieces: Iterable[Bytes]) -> Stream:
    packer = Packer(role, num_bytes)
    for piece in pieces:
        packer.add(piece)
    return packer.finish()


def pack_planes(role: Role, num: int, num_values: int, pieces: Iterable[Bits]) -> list[Stream]:
    """Pack `num` byte planes of values that arrive in pieces."""
    packers = [Packer(role, num_values) for _ in range(num)]
    for piece in pieces:
        for packer, plane in zip(packers, split_planes(piece, num), strict=True):
            packer.add(plane)
    return [packer.finish() for packer in packers]


def pack_full(raw: memoryview) -> Stream:
    packed = bytearray()
    for piece in _compressed_pieces(raw):
        packed += piece
        if len(packed) >= len(raw):
            break
    data = memoryview(packed) if len(packed) < len(raw) else raw
    return Stream(role=Role.FULL, num_bytes=len(raw), data=data)


def packed_bytes(raw: memoryview) -> int:
    """Packed size of a tensor, without keeping the bytes."""
    return min(len(raw), sum(map(len, _compressed_pieces(raw))))


def _compressed_pieces(raw: memoryview) -> Iterator[bytes]:
    compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL).compressobj(size=len(raw))
    for start in range(0, len(raw), WHOLE_STEP_BYTES):
        yield compressor.compress(raw[start : start + WHOLE_STEP_BYTES])
    yield compressor.flush()


def unpack(stream: Stream) -> Bytes:
    """Exactly the declared bytes. The caller must check `num_bytes` first."""
    where = f"delta stream {stream.role.name.lower()}"
    return np.frombuffer(decompress(stream.data, stream.num_bytes, where), np.uint8)


def compress(raw: memoryview) -> Data:
    """Compressed data if shorter, otherwise the input; the length distinguishes the two."""
    return min(raw, zstandard.ZstdCompressor(level=ZSTD_LEVEL).compress(raw), key=len)


def decompress(data: Data, num_bytes: int, where: str) -> Data:
    if len(data) == num_bytes:
        return data
    if len(data) > num_bytes:
        raise WeightsError(
            f"{where}: {len(data)} packed bytes for {num_bytes}; the delta is damaged"
        )
    try:
        # zstd trusts the size declared in the frame before applying any limit of ours.
        declared = zstandard.frame_content_size(data)
        if declared != num_bytes:
            raise WeightsError(f"{where}: zstd frame declares {declared} bytes, not {num_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=num_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise WeightsError(f"{where} is damaged: {error}") from None
    if len(raw) != num_bytes:
        raise WeightsError(f"{where} unpacks to {len(raw)} bytes, not {num_bytes}")
    return raw
