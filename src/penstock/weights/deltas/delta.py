# SPDX-License-Identifier: Apache-2.0
"""Delta format: turns the tensors of one version into another version's, as one byte stream.

    magic · length · JSON header · frame · frame · … · end

A frame is two lengths, a small compressed head (names, kind, sizes) and the streams of one payload.
Frames are self-contained, so a delta is written while tensors are compared and applied while its
bytes arrive. Neighboring tensors with few changes share a frame; a large or much changed one has a
separate frame.

Owns the layout and its limits. Deltas are not trusted: lengths are bounded by the tensor sizes from
the verified manifest, and a resulting tensor must be compared with its digest in the manifest
before use. Knows no stores.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

import msgspec

from penstock.bounds import is_digest
from penstock.errors import WeightsError
from penstock.weights.deltas.codec import (
    TensorDiff,
    diff_tensor,
    encode_diffs,
    encode_one,
)
from penstock.weights.deltas.numpy_kernels import BITS
from penstock.weights.deltas.payload import Kind, Payload, Role, Stream, compress, decompress
from penstock.weights.tensors import NUM_THREADS

MAGIC = b"penstock-delta\r\n"
FORMAT = 1
MAX_HEADER_BYTES = 4096
MAX_HEAD_BYTES = 1 << 20
MAX_FRAME_TENSORS = 1024
"""Maximum tensors per frame; with names of 256 characters the head stays below `MAX_HEAD_BYTES`."""
MAX_STREAMS = 64
SHARED_FRAME_BYTES = 32 << 20
"""Approximate size of a shared frame, large enough to make zstd tables cheap."""

MIN_THREADED_BYTES = 8 << 20
AHEAD_BYTES = 16 << 20
MAX_AHEAD = 16
"""Number of tensors searched ahead."""

_LENGTH = struct.Struct("<I")
_LENGTHS = struct.Struct("<II")
"""Sizes of a frame's head: unpacked, packed. Both are zero at the end of the delta."""


class Writable(Protocol):
    def write(self, data: bytes | memoryview, /) -> object: ...


Tensor = tuple[str, int, memoryview | None, memoryview]
"""Name, item size, raw bytes in the base (None if it has no such tensor), raw new bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaHeader:
    format: int
    base: str
    """Digest of the base."""
    target: str
    """Digest of the target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One payload and its tensors, for `codec.apply_payload(payload, tensors by these names,
    …)`."""

    names: tuple[str, ...]
    item_bytes: int
    payload: Payload


class _StreamHead(msgspec.Struct, array_like=True, frozen=True):
    role: Role
    num_bytes: int
    num_packed: int


class _Head(msgspec.Struct, array_like=True, frozen=True):
    names: tuple[str, ...]
    item_bytes: int
    kind: Kind
    num_changed: int
    streams: tuple[_StreamHead, ...]


_header_decoder = msgspec.json.Decoder(DeltaHeader)
_head_decoder = msgspec.msgpack.Decoder(_Head)


# --- writing -------------------------------------------------------------------------------------


def write_delta(
    out: Writable, base_digest: str, target_digest: str, tensors: Iterable[Tensor]
) -> None:
    """Write a delta. `tensors` yields every tensor of the target once; few are held at a time."""
    write_delta_header(out, base_digest, target_digest)
    write_frames(out, tensors)


def write_delta_header(out: Writable, base_digest: str, target_digest: str) -> None:
    """The part before the frames."""
    header = msgspec.json.encode(
        DeltaHeader(format=FORMAT, base=base_digest, target=target_digest), order="sorted"
    )
    out.write(MAGIC + _LENGTH.pack(len(header)) + header)


def write_frames(out: Writable, tensors: Iterable[Tensor]) -> None:
    """The rest: it does not depend on digests, so both files may be hashed meanwhile."""
    shared = {item_bytes: _SharedFrame() for item_bytes in BITS}
    for (name, item_bytes, base, new), found in _diff_ahead(tensors):
        if found is not None and found.is_rare:
            if shared[item_bytes].add(name, found):
                shared[item_bytes] = _write_shared_frame(out, item_bytes, shared[item_bytes])
        else:
            _write_frame(out, [name], item_bytes, encode_one(found, base, new))
    for item_bytes, rest in shared.items():
        _write_shared_frame(out, item_bytes, rest)
    out.write(_LENGTHS.pack(0, 0))


def _diff_ahead(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, TensorDiff | None]]:
    """Tensors in order, each with its changes. Small ones are searched ahead in threads; a large
    one uses all threads when its turn comes."""
    ahead: deque[tuple[Tensor, Future[TensorDiff | None] | None]] = deque()
    num_ahead = 0
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for tensor in tensors:
            num_bytes = len(tensor[-1])
            is_large = num_bytes >= MIN_THREADED_BYTES
            ahead.append((tensor, None if is_large else pool.submit(_diff, tensor)))
            num_ahead += num_bytes
            while ahead and (len(ahead) > MAX_AHEAD or num_ahead > AHEAD_BYTES):
                num_ahead -= len(ahead[0][0][-1])
                yield _diff_result(*ahead.popleft(), pool)
        while ahead:
            yield _diff_result(*ahead.popleft(), pool)


def _diff_result(
    tensor: Tensor, found: Future[TensorDiff | None] | None, pool: Executor
) -> tuple[Tensor, TensorDiff | None]:
    return tensor, _diff(tensor, pool) if found is None else found.result()


def _diff(tensor: Tensor, pool: Executor | None = None) -> TensorDiff | None:
    _, item_bytes, base, new = tensor
    return diff_tensor(base, new, item_bytes, pool=pool)


@dataclass(slots=True)
class _SharedFrame:
    """Tensors collected for a shared frame."""

    names: list[str] = field(default_factory=list[str])
    found: list[TensorDiff] = field(default_factory=list[TensorDiff])
    num_bytes: int = 0

    def add(self, name: str, found: TensorDiff) -> bool:
        """Add a tensor; True if the frame is full."""
        self.names.append(name)
        self.found.append(found)
        self.num_bytes += found.new.nbytes
        return self.num_bytes >= SHARED_FRAME_BYTES or len(self.names) == MAX_FRAME_TENSORS


def _write_shared_frame(out: Writable, item_bytes: int, shared: _SharedFrame) -> _SharedFrame:
    if shared.names:
        payload = encode_diffs(shared.found)
        assert payload is not None, "tensors with few changes have a small sparse form"
        _write_frame(out, shared.names, item_bytes, payload)
    return _SharedFrame()


def _write_frame(out: Writable, names: list[str], item_bytes: int, payload: Payload) -> None:
    streams = tuple(_StreamHead(s.role, s.num_bytes, len(s.data)) for s in payload.streams)
    head = msgspec.msgpack.encode(
        _Head(tuple(names), item_bytes, payload.kind, payload.num_changed, streams)
    )
    packed = compress(memoryview(head))
    out.write(_LENGTHS.pack(len(head), len(packed)))
    out.write(packed)
    for stream in payload.streams:
        out.write(stream.data)


# --- reading -------------------------------------------------------------------------------------


def read_delta(source: BinaryIO, sizes: Mapping[str, int]) -> tuple[DeltaHeader, Iterator[Frame]]:
    """The header, and the frames lazily; raises WeightsError at the first error.

    `sizes` are the byte sizes of all tensors of the target version. If the frames end without an
    error, each tensor was in exactly one.
    """
    if _read_exactly(source, len(MAGIC), "magic") != MAGIC:
        raise WeightsError("this file is not a weight delta (wrong magic bytes)")
    (num_bytes,) = _LENGTH.unpack(_read_exactly(source, _LENGTH.size, "header"))
    if num_bytes > MAX_HEADER_BYTES:
        raise WeightsError(
            f"delta: header of {num_bytes} bytes exceeds the limit of {MAX_HEADER_BYTES}"
        )
    try:
        header = _header_decoder.decode(_read_exactly(source, num_bytes, "header"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"delta: header is damaged: {error}") from None
    if header.format != FORMAT:
        raise WeightsError(
            f"delta has format {header.format}, this node supports {FORMAT}; update penstock"
        )
    if not is_digest(header.base) or not is_digest(header.target):
        raise WeightsError("delta: invalid digests in the header")
    return header, _read_frames(source, sizes)


def _read_frames(source: BinaryIO, sizes: Mapping[str, int]) -> Generator[Frame]:
    missing = set(sizes)
    while (head := _read_head(source)) is not None:
        if not missing.issuperset(head.names) or len(set(head.names)) != len(head.names):
            odd = next((name for name in head.names if name not in missing), head.names[0])
            raise WeightsError(f"delta: tensor {odd[:80]!r} is repeated or not in this version")
        missing.difference_update(head.names)
        _check_sizes(head, sum(sizes[name] for name in head.names))
        streams = tuple(
            Stream(
                role=stream.role,
                num_bytes=stream.num_bytes,
                data=_read_exactly(source, stream.num_packed, f"tensor {head.names[0]}"),
            )
            for stream in head.streams
        )
        payload = Payload(kind=head.kind, num_changed=head.num_changed, streams=streams)
        yield Frame(names=head.names, item_bytes=head.item_bytes, payload=payload)
    if missing:
        raise WeightsError(f"delta: {len(missing)} tensors are missing, such as {min(missing)}")
    if source.read(1):
        raise WeightsError("delta: unexpected bytes after the end")


def _read_head(source: BinaryIO) -> _Head | None:
    num_bytes, num_packed = _LENGTHS.unpack(_read_exactly(source, _LENGTHS.size, "frame"))
    if not num_bytes and not num_packed:
        return None
    if num_packed > num_bytes or num_bytes > MAX_HEAD_BYTES:
        raise WeightsError(f"delta: invalid frame head size {num_bytes} (packed {num_packed})")
    packed = _read_exactly(source, num_packed, "frame")
    try:
        head = _head_decoder.decode(decompress(packed, num_bytes, "delta frame head"))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WeightsError(f"delta: frame head is damaged: {error}") from None
    if not 0 < len(head.names) <= MAX_FRAME_TENSORS or len(head.streams) > MAX_STREAMS:
        raise WeightsError(
            f"delta: invalid frame of {len(head.names)} tensors and {len(head.streams)} streams"
        )
    return head


def _check_sizes(head: _Head, num_bytes: int) -> None:
    if any(not 0 <= stream.num_packed <= stream.num_bytes for stream in head.streams):
        raise WeightsError(f"delta: tensor {head.names[0]} has streams of invalid sizes")
    total = sum(stream.num_bytes for stream in head.streams)
    if total > num_bytes:
        raise WeightsError(
            f"delta: streams of {total} bytes exceed the {num_bytes} bytes of their tensors "
            f"(first: {head.names[0]})"
        )


def _read_exactly(source: BinaryIO, num_bytes: int, where: str) -> bytes:
    pieces: list[bytes] = []
    while num_bytes > 0:
        piece = source.read(num_bytes)
        if not piece:
            raise WeightsError(f"delta is truncated in its {where}")
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)
