# SPDX-License-Identifier: Apache-2.0
"""Reads files of a snapshot once, front to back, and digests them, safetensors tensor by tensor.

Owns the safetensors header (8 bytes of length, then JSON) and its limits: nothing is allocated or
trusted before its size is checked. Works on bytes alone: no torch, no arrays, and nothing here
knows where the bytes came from.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec
from blake3 import blake3

from penstock.errors import WeightsError

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Every dtype a snapshot may hold, by its safetensors name."""
MAX_HEADER_BYTES = 100_000_000
"""The safetensors format's own bound."""
MAX_TENSORS = 1_000_000
MAX_DIMS = 16
PIECE_BYTES = 4 << 20
TENSOR_NAME = re.compile(r"[\x21-\x7e]{1,256}")
"""Printable and without blanks, or the lines of `weights_digest` would not be unique."""
METADATA = "__metadata__"

Sink = Callable[[bytes], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """BLAKE3 (hex) of the tensor's raw little-endian bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What one pass over a file found."""

    blob: str
    """BLAKE3 (hex) of the whole file."""
    num_bytes: int
    tensors: tuple[TensorEntry, ...]
    mtime_ns: int = field(default=0, compare=False)
    """When the file was last written to, as of the moment before this pass; 0: nobody looked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """Where a tensor lies in its file."""

    dtype: str
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A safetensors file without its weights."""

    head: bytes
    """Everything before the first tensor."""
    byte_ranges: Mapping[str, TensorRange]

    @property
    def num_bytes(self) -> int:
        return len(self.head) + sum(
            byte_range.num_bytes for byte_range in self.byte_ranges.values()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeaderEntry:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """How many bytes such a tensor has, or WeightsError when there can be no such tensor."""
    if not TENSOR_NAME.fullmatch(name):
        raise WeightsError(f"tensor name {name[:80]!r} is empty, too long or not printable ASCII")
    if dtype not in ITEM_BYTES:
        raise WeightsError(
            f"tensor {name}: dtype {dtype[:20]!r} is none of {', '.join(ITEM_BYTES)}"
        )
    if len(shape) > MAX_DIMS or any(not 0 <= size < 1 << 48 for size in shape):
        raise WeightsError(
            f"tensor {name}: {str(shape)[:80]} is no shape of at most {MAX_DIMS} sizes"
        )
    return math.prod(shape) * ITEM_BYTES[dtype]


def read_layout(source: BinaryIO, name: str) -> Layout:
    """From the front of a file; its weights are left unread."""
    reader = _DigestingReader(source, name, None)
    length, header = _read_header(reader)
    byte_ranges = {
        tensor: TensorRange(
            dtype=found.dtype,
            start=reader.num_bytes + found.data_offsets[0],
            end=reader.num_bytes + found.data_offsets[1],
        )
        for tensor, found in parse_header(header, name)
    }
    return Layout(head=length + header, byte_ranges=byte_ranges)


def scan(source: BinaryIO, name: str, sink: Sink | None = None) -> Scan:
    """Digest the file, and its tensors if it has any; `sink` gets exactly the bytes digested."""
    reader = _DigestingReader(source, name, sink)
    tensors = _scan_tensors(reader) if name.endswith(".safetensors") else ()
    while reader.read_up_to(PIECE_BYTES):
        pass
    return Scan(blob=reader.digest(), num_bytes=reader.num_bytes, tensors=tensors)


class _DigestingReader:
    """One pass over a file: each piece goes to the file's digest, the sink and the caller."""

    def __init__(self, source: BinaryIO, name: str, sink: Sink | None) -> None:
        self.name = name
        self.num_bytes = 0
        self._source = source
        self._sink = sink
        self._hash = blake3()

    def read_up_to(self, max_bytes: int) -> bytes:
        piece = self._source.read(max_bytes)
        self.num_bytes += len(piece)
        self._hash.update(piece)
        if self._sink is not None:
            self._sink(piece)
        return piece

    def read_exactly(self, num_bytes: int) -> bytes:
        pieces: list[bytes] = []
        while num_bytes > 0:
            piece = self.read_up_to(min(num_bytes, PIECE_BYTES))
            if not piece:
                raise WeightsError(f"{self.name} is cut off at byte {self.num_bytes}")
            pieces.append(piece)
            num_bytes -= len(piece)
        return b"".join(pieces)

    def digest(self) -> str:
        return self._hash.hexdigest()


def _read_header(reader: _DigestingReader) -> tuple[bytes, bytes]:
    """Its length, and itself."""
    length = reader.read_exactly(8)
    header_bytes = int.from_bytes(length, "little")
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise WeightsError(
            f"{reader.name}: header of {header_bytes} bytes, at most {MAX_HEADER_BYTES} allowed; "
            "this is no safetensors file"
        )
    return length, reader.read_exactly(header_bytes)


def _scan_tensors(reader: _DigestingReader) -> tuple[TensorEntry, ...]:
    _, header = _read_header(reader)
    ranges = parse_header(header, reader.name)
    tensors = tuple(_digest_tensor(reader, name, found) for name, found in ranges)
    if reader.read_up_to(1):
        raise WeightsError(f"{reader.name}: bytes after the last tensor belong to none")
    return tensors


def _digest_tensor(reader: _DigestingReader, name: str, found: _HeaderEntry) -> TensorEntry:
    start, end = found.data_offsets
    left = end - start
    digest = blake3()
    while left > 0:
        piece = reader.read_up_to(min(left, PIECE_BYTES))
        if not piece:
            raise WeightsError(f"{reader.name} is cut off inside tensor {name}")
        digest.update(piece)
        left -= len(piece)
    return TensorEntry(name=name, dtype=found.dtype, shape=found.shape, digest=digest.hexdigest())


_raw_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_range = msgspec.json.Decoder(_HeaderEntry)


def parse_header(header: bytes, where: str) -> list[tuple[str, _HeaderEntry]]:
    """The tensors in file order; together they must cover the data without gap or overlap."""
    try:
        raw = _raw_header.decode(header)
        raw.pop(METADATA, None)
        if len(raw) > MAX_TENSORS:
            raise WeightsError(f"{where}: {len(raw)} tensors, at most {MAX_TENSORS} allowed")
        ranges = [(name, _raw_range.decode(value)) for name, value in raw.items()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{where}: safetensors header is damaged: {error}") from None
    ranges.sort(key=lambda item: item[1].data_offsets)
    position = 0
    for name, found in ranges:
        num_bytes = check_tensor(name, found.dtype, found.shape)
        if found.data_offsets != (position, position + num_bytes):
            raise WeightsError(
                f"{where}: tensor {name} should take bytes {position} to {position + num_bytes}, "
                f"its header says {found.data_offsets[0]} to {found.data_offsets[1]}"
            )
        position += num_bytes
    return ranges
