# SPDX-License-Identifier: Apache-2.0
"""Reads each file of a snapshot once, sequentially, and hashes it; safetensors files per tensor.

Owns parsing of the safetensors header (8-byte length, then JSON) and its limits: sizes are checked
before anything is allocated or trusted. Works on bytes only: no torch, no arrays, no knowledge of
where the bytes come from.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO

import msgspec
from blake3 import blake3

from penstock.errors import WeightsError

ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Item size of every dtype allowed in a snapshot, by safetensors name."""
_FILE_ORDER = (
    *("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "I16", "U16", "F16", "BF16"),
    *("I32", "U32", "F32", "F64", "I64", "U64"),
)
"""Files start with tensors of the last of these dtypes; inside one dtype, names are sorted."""
_HEADER_ALIGNMENT = 8
MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors format."""
MAX_TENSORS = 1_000_000
MAX_DIMS = 16
PIECE_BYTES = 4 << 20
CACHED_BYTES = 512 << 10
"""A piece of this size is still in a core's cache when it is hashed after being read."""
NUM_THREADS = min(len(os.sched_getaffinity(0)), 16)
"""Of one hash or one search for changes of a large file: the cores of this process. More than 16
wait for memory."""
MIN_THREADED_BYTES = 16 << 20
"""Below this size one thread finishes before others would start."""
TENSOR_NAME = re.compile(r"[\x21-\x7e]{1,256}")
"""Printable without spaces, so that the lines of `weights_digest` are unambiguous."""
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
    """Result of one pass over a file."""

    blob: str
    """BLAKE3 (hex) of the file."""
    num_bytes: int
    tensors: tuple[TensorEntry, ...]
    mtime_ns: int = field(default=0, compare=False)
    """mtime of the file before this pass; 0 if not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRange:
    """Byte range of a tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A safetensors file without its weights."""

    head: bytes
    """All bytes before the first tensor."""
    byte_ranges: Mapping[str, TensorRange]

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return max((found.end for found in self.byte_ranges.values()), default=len(self.head))

    @property
    def sizes(self) -> dict[str, int]:
        """Size in bytes of each tensor."""
        return {name: found.end - found.start for name, found in self.byte_ranges.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeaderEntry:
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def check_tensor(name: str, dtype: str, shape: tuple[int, ...]) -> int:
    """Size of the tensor in bytes; raises WeightsError if name, dtype or shape is invalid."""
    if not TENSOR_NAME.fullmatch(name):
        raise WeightsError(f"tensor name {name[:80]!r} is empty, too long or not printable ASCII")
    if dtype not in ITEM_BYTES:
        raise WeightsError(
            f"tensor {name}: unknown dtype {dtype[:20]!r}; expected one of {', '.join(ITEM_BYTES)}"
        )
    if len(shape) > MAX_DIMS or any(not 0 <= size < 1 << 48 for size in shape):
        raise WeightsError(
            f"tensor {name}: invalid shape {str(shape)[:80]} (at most {MAX_DIMS} dimensions)"
        )
    return math.prod(shape) * ITEM_BYTES[dtype]


def make_layout(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> Layout:
    """The layout of a file with these tensors (dtype and shape by name), as `safetensors` writes
    it: known before any weight is, so that several processes can fill one file."""
    entries: dict[str, object] = {METADATA: {"format": "pt", **(metadata or {})}}
    ranges: list[tuple[str, str, tuple[int, ...], int, int]] = []
    at = 0
    for name, (dtype, shape) in sorted(
        tensors.items(), key=lambda item: (-_FILE_ORDER.index(item[1][0]), item[0])
    ):
        end = at + check_tensor(name, dtype, shape)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (at, end)}
        ranges.append((name, dtype, shape, at, end))
        at = end
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % _HEADER_ALIGNMENT)
    head = len(header).to_bytes(8, "little") + header
    return Layout(
        head=head,
        byte_ranges={
            name: TensorRange(
                dtype=dtype, shape=shape, start=len(head) + start, end=len(head) + end
            )
            for name, dtype, shape, start, end in ranges
        },
    )


def read_layout(source: BinaryIO, name: str) -> Layout:
    """Read the header of a file, without its weights."""
    reader = _DigestingReader(source, name)
    length, header = _read_header(reader)
    head = length + header
    byte_ranges = {
        tensor: TensorRange(
            dtype=found.dtype, shape=found.shape, start=len(head) + start, end=len(head) + end
        )
        for tensor, found in parse_header(header, name)
        for start, end in [found.data_offsets]
    }
    return Layout(head=head, byte_ranges=byte_ranges)


def new_hash(num_bytes: int) -> blake3:
    """A hash for `num_bytes` bytes. The number of threads is explicit, so RAYON_NUM_THREADS does
    not count: it keeps other libraries from taking all cores."""
    return blake3(max_threads=NUM_THREADS if num_bytes >= MIN_THREADED_BYTES else 1)


def scan(source: BinaryIO, name: str, sink: Sink | None = None, *, num_bytes: int = 0) -> Scan:
    """Hash the file, and its tensors if it has any; `sink` gets exactly the hashed bytes.

    num_bytes: its size, if known; a large one is hashed with all cores."""
    reader = _DigestingReader(source, name, sink, num_bytes)
    tensors = _scan_tensors(reader) if name.endswith(".safetensors") else ()
    while reader.read_up_to(PIECE_BYTES):
        pass
    return Scan(blob=reader.hash.hexdigest(), num_bytes=reader.num_bytes, tensors=tensors)


def has_content(source: BinaryIO, tensors: Sequence[TensorEntry]) -> bool:
    """Whether a file is what `make_layout` makes of exactly these tensors: each byte is read and
    hashed once, since layout and digests together leave no bit open. False says only that it is not
    known to be so: the layout may be another."""
    layout = make_layout({tensor.name: (tensor.dtype, tensor.shape) for tensor in tensors})
    file = source.fileno()
    if os.fstat(file).st_size != layout.num_bytes:
        return False
    if os.pread(file, len(layout.head), 0) != layout.head:
        return False

    def is_whole(tensor: TensorEntry) -> bool:
        place = layout.byte_ranges[tensor.name]
        digest = new_hash(place.end - place.start)
        piece = memoryview(bytearray(min(place.end - place.start, CACHED_BYTES)))
        at = place.start
        while at < place.end:
            num_read = os.preadv(file, [piece[: place.end - at]], at)
            if not num_read:
                return False
            digest.update(piece[:num_read])
            at += num_read
        return digest.hexdigest() == tensor.digest

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        return all(pool.map(is_whole, tensors))


class _DigestingReader:
    """One pass over a file: each piece goes to the hash, the sink and the caller."""

    def __init__(
        self, source: BinaryIO, name: str, sink: Sink | None = None, num_bytes: int = 0
    ) -> None:
        """num_bytes: size of the file, if known."""
        self.name = name
        self.num_bytes = 0
        self.hash = new_hash(num_bytes)
        self._source = source
        self._sink = sink

    def read_up_to(self, max_bytes: int) -> bytes:
        piece = self._source.read(max_bytes)
        self.num_bytes += len(piece)
        self.hash.update(piece)
        if self._sink is not None:
            self._sink(piece)
        return piece

    def pieces(self, num_bytes: int, where: str = "") -> Iterator[bytes]:
        """Exactly this many bytes."""
        while num_bytes > 0:
            piece = self.read_up_to(min(num_bytes, PIECE_BYTES))
            if not piece:
                where = where or f"at byte {self.num_bytes}"
                raise WeightsError(f"{self.name} is truncated {where}")
            yield piece
            num_bytes -= len(piece)


def _read_header(reader: _DigestingReader) -> tuple[bytes, bytes]:
    """The length field and the header itself."""
    length = b"".join(reader.pieces(8))
    header_bytes = int.from_bytes(length, "little")
    if not 2 <= header_bytes <= MAX_HEADER_BYTES:
        raise WeightsError(
            f"{reader.name}: header of {header_bytes} bytes exceeds the limit of "
            f"{MAX_HEADER_BYTES}; this is not a safetensors file"
        )
    return length, b"".join(reader.pieces(header_bytes))


def _scan_tensors(reader: _DigestingReader) -> tuple[TensorEntry, ...]:
    _, header = _read_header(reader)
    ranges = parse_header(header, reader.name)
    tensors = tuple(_digest_tensor(reader, name, found) for name, found in ranges)
    if reader.read_up_to(1):
        raise WeightsError(f"{reader.name}: unexpected bytes after the last tensor")
    return tensors


def _digest_tensor(reader: _DigestingReader, name: str, found: _HeaderEntry) -> TensorEntry:
    start, end = found.data_offsets
    digest = new_hash(end - start)
    for piece in reader.pieces(end - start, f"inside tensor {name}"):
        digest.update(piece)
    return TensorEntry(name=name, dtype=found.dtype, shape=found.shape, digest=digest.hexdigest())


_raw_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_raw_range = msgspec.json.Decoder(_HeaderEntry)


def parse_header(header: bytes, where: str) -> list[tuple[str, _HeaderEntry]]:
    """The tensors in file order; checks that they cover the data without gaps or overlaps."""
    try:
        raw = _raw_header.decode(header)
        raw.pop(METADATA, None)
        if len(raw) > MAX_TENSORS:
            raise WeightsError(f"{where}: {len(raw)} tensors exceed the limit of {MAX_TENSORS}")
        ranges = [(name, _raw_range.decode(value)) for name, value in raw.items()]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"{where}: safetensors header is damaged: {error}") from None
    ranges.sort(key=lambda item: item[1].data_offsets)
    position = 0
    for name, found in ranges:
        num_bytes = check_tensor(name, found.dtype, found.shape)
        if found.data_offsets != (position, position + num_bytes):
            raise WeightsError(
                f"{where}: tensor {name} should be at bytes {position} to {position + num_bytes}, "
                f"but the header says {found.data_offsets[0]} to {found.data_offsets[1]}"
            )
        position += num_bytes
    return ranges
