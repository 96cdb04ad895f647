# SPDX-License-Identifier: Apache-2.0
"""Hostile manifests, safetensors headers and deltas: WeightsError or something harmless, in little
memory, and never a wrong hash taken for a right one. Payloads have `test_codec_fuzz`."""

from __future__ import annotations

import io
import json
import math
import resource
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.weights.snapshot_folders import safetensors_bytes, weights_bytes

from penstock.bounds import is_digest
from penstock.errors import WeightsError
from penstock.types import PolicyName
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.codec import apply_payload
from penstock.weights.deltas.delta import read_delta, write_delta
from penstock.weights.deltas.file_delta import make_delta
from penstock.weights.manifest import (
    FileEntry,
    digest_of,
    encode_manifest,
    is_file_name,
    make_manifest,
    parse_manifest,
    weights_digest,
)
from penstock.weights.pulling.cache import BlobCache
from penstock.weights.tensors import ITEM_BYTES, Scan, TensorEntry, parse_header, scan

LIMIT_BYTES = 8 << 20
"""More than any of these small inputs is worth, far less than what they claim."""
A, B = digest_of(b"a"), digest_of(b"b")
MANIFEST = encode_manifest(
    make_manifest(
        PolicyName("solver"),
        7,
        [
            FileEntry(name="model.safetensors", blob=A, bytes=1000),
            FileEntry(name="config.json", blob=B, bytes=20),
        ],
        [
            TensorEntry(name=f"layers.{number}.up", dtype="BF16", shape=(3, number), digest=B)
            for number in range(5)
        ],
    )
)
HOSTILE: list[Any] = [
    0, -1, 1 << 31, 1 << 63, -(1 << 63), 1 << 64, 10**400, 1e308, 0.5, True, None, "", "\x00",
    "../x", "\ud800", "x" * 5000, [], {}, [[]] * 50, {"a": {}}, [1 << 40] * 20,
]  # fmt: skip
"""Hostile values for a field."""
SPLICES = [b"[" * 4000, b'{"a":' * 4000, b"9" * 5000, b"\xff\xfe", b"\\u0000", b"1e999", b"NaN"]


def measured(work: Callable[[], Any]) -> Any:
    """The result, or None if rejected; checks that memory use stayed small."""
    tracemalloc.start()
    try:
        return work()
    except WeightsError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < LIMIT_BYTES


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Flipped bits, truncation, and misplaced pieces of itself or of hostile data."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "flip", "cut", "splice", "again", "digit"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[at : at + draw(st.integers(1, 200))]
            case "splice":
                data[at:at] = draw(st.sampled_from(SPLICES))
            case "again":
                data[at:at] = whole[draw(st.integers(0, len(whole))) :][: draw(st.integers(0, 99))]
            case _:
                digits = [place for place, byte in enumerate(data) if chr(byte).isdigit()]
                if digits:
                    place = draw(st.sampled_from(digits))
                    data[place : place + 1] = str(draw(st.integers(0, 1 << 70))).encode()
    return bytes(data)


def replaced(draw: st.DrawFn, value: Any) -> Any:
    """One value inside is changed, removed or duplicated."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 3)):
        inside = cast("Any", value)
        key = draw(st.sampled_from(list(inside) if isinstance(value, dict) else range(len(inside))))
        match draw(st.integers(0, 5)):
            case 0:
                del inside[key]
            case 1 if isinstance(value, list):
                inside.append(inside[key])
            case _:
                inside[key] = replaced(draw, inside[key])
        return inside
    return deepcopy(draw(st.sampled_from(HOSTILE)))


@st.composite
def lying(draw: st.DrawFn, whole: bytes) -> bytes:
    """Well-formed JSON with different content."""
    value = json.loads(whole)
    for _ in range(draw(st.integers(1, 2))):
        value = replaced(draw, value)
    with suppress(LookupError, TypeError, AttributeError, ValueError):
        tensors = [TensorEntry(**tensor) for tensor in value["tensors"]]
        value["weights_digest"] = weights_digest(
            tensors
        )  # otherwise all would be rejected for this alone
    return json.dumps(value).encode()


# --- manifests --------------------------------------------------------------------------------


@given(data=st.one_of(damaged(MANIFEST), lying(MANIFEST)))
@settings(deadline=None, max_examples=700)
def test_a_hostile_manifest_is_refused_or_true(data: bytes) -> None:
    found = measured(lambda: parse_manifest(data))
    if found is None:
        return
    assert weights_digest(found.tensors) == found.weights_digest
    assert parse_manifest(encode_manifest(found)) == found
    assert all(is_file_name(file.name) and is_digest(file.blob) for file in found.files)
    assert all(is_digest(tensor.digest) for tensor in found.tensors)


# --- safetensors headers ----------------------------------------------------------------------

WEIGHTS = weights_bytes({"a.weight": (40, 30), "b.weight": (5,), "c": ()}, 1)
HEADER_BYTES = 8 + int.from_bytes(WEIGHTS[:8], "little")
HEADER = WEIGHTS[8:HEADER_BYTES]


@given(
    header=st.one_of(damaged(HEADER), lying(HEADER)),
    length=st.one_of(st.none(), st.integers(0, (1 << 64) - 1)),
)
@settings(deadline=None, max_examples=400)
def test_a_hostile_header_is_refused_or_covers_its_file(header: bytes, length: int | None) -> None:
    data = safetensors_bytes(header, WEIGHTS[HEADER_BYTES:])
    if length is not None:
        data = length.to_bytes(8, "little") + data[8:]
    found = measured(lambda: scan(io.BytesIO(data), "model.safetensors"))
    if found is None:
        return
    assert found.blob == digest_of(data)
    num_bytes = sum(math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in found.tensors)
    assert num_bytes == len(WEIGHTS) - HEADER_BYTES


# --- deltas between files ---------------------------------------------------------------------

NEW = bytearray(WEIGHTS)
for _place in range(HEADER_BYTES, len(NEW), 90):
    NEW[_place] ^= 3
BASE_BLOB, NEW_BLOB = digest_of(WEIGHTS), digest_of(bytes(NEW))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the base, and the correct delta."""
    root = tmp_path_factory.mktemp("node")
    cache = root / "cache"
    BlobCache(cache)
    (cache / "blobs" / BASE_BLOB).write_bytes(WEIGHTS)
    (root / "new").write_bytes(NEW)
    with (root / "delta").open("wb") as out:
        base = cache / "blobs" / BASE_BLOB
        make_delta(base, root / "new", out, base_blob=BASE_BLOB, target_blob=NEW_BLOB)
    return root


def make_from(node: Path, delta: bytes) -> Scan | None:
    """As in a pull from a weight server that sends these bytes as the delta."""
    blob = digest_of(delta)
    (node / "cache" / "blobs" / blob).write_bytes(delta)
    step = DeltaEntry(base=BASE_BLOB, target=NEW_BLOB, blob=blob, bytes=len(delta))
    file = FileEntry(name="model.safetensors", blob=NEW_BLOB, bytes=len(NEW))
    return measured(lambda: BlobCache(node / "cache").rebuild(file, [step]))


def test_hostile_deltas_never_produce_a_wrong_file(node: Path) -> None:
    delta = (node / "delta").read_bytes()
    blobs = node / "cache" / "blobs"
    num_made = 0

    @given(data=st.one_of(st.just(delta), damaged(delta)))
    @settings(deadline=None, max_examples=300)
    def check(data: bytes) -> None:
        nonlocal num_made
        found = make_from(node, data)
        made = blobs / NEW_BLOB
        assert made.exists() == (found is not None)
        if found is not None:
            num_made += 1
            assert found.blob == NEW_BLOB and made.read_bytes() == NEW
        assert (blobs / BASE_BLOB).read_bytes() == WEIGHTS
        for path in blobs.iterdir():
            if path.name != BASE_BLOB:
                path.unlink()

    check()
    assert num_made > 0, "the right delta is taken"


# --- memory of the process --------------------------------------------------------------------

ROOM_BYTES = 512 << 20
CLAIMS: dict[str, Callable[[], object]] = {
    "nested manifest": lambda: parse_manifest(b"[" * 10_000_000),
    "manifest of many tensors": lambda: parse_manifest(
        MANIFEST.replace(b'"shape":[3,1]', b'"shape":[' + b"1," * 5_000_000 + b"1]")
    ),
    "header of 2^63 bytes": lambda: scan(io.BytesIO(b"\xff" * 100), "a.safetensors"),
    "header of 100 MB": lambda: scan(
        io.BytesIO((100_000_000).to_bytes(8, "little") + b"{"), "a.safetensors"
    ),
    "nested header": lambda: parse_header(b'{"a":' * 5_000_000, "a"),
    "tensor of 2^700 bytes": lambda: parse_header(
        json.dumps(
            {"a": {"dtype": "F32", "shape": [1 << 47] * 15, "data_offsets": [0, 4]}}
        ).encode(),
        "a",
    ),
    "frame of 4 GB": lambda: frames(struct.pack("<II", (1 << 32) - 1, 9)),
    "stream of 2^62 bytes": lambda: frames(head([["a"], 2, "full", 0, [[6, 1 << 62, 1 << 62]]])),
    "streams without end": lambda: frames(head([["a"], 2, "sparse", 9, [[0, 0, 0]] * 100_000])),
    "changes without end": lambda: frames(head([["a"], 2, "sparse", 1 << 62, [[0, 9, 9]]])),
    "names without end": lambda: frames(head([["a"] * 200_000, 2, "same", 0, []])),
    "nested head": lambda: frames(struct.pack("<II", 900_000, 900_000) + b"\x91" * 900_000),
    "head that is a bomb": lambda: frames(struct.pack("<II", 1 << 20, len(BOMB)) + BOMB),
}
BOMB = zstandard.ZstdCompressor().compress(bytes(1 << 27))


def head(value: object) -> bytes:
    packed = msgspec.msgpack.encode(value)
    return struct.pack("<II", len(packed), len(packed)) + packed


def frames(data: bytes) -> object:
    """Apply all frames of a delta that continues like this, for one tensor of 18 bytes."""
    out = io.BytesIO()
    write_delta(out, A, B, [])
    delta = out.getvalue()[:-8] + data + bytes(64)
    target = memoryview(bytearray(18))
    for frame in read_delta(io.BytesIO(delta), {"a": 18})[1]:
        apply_payload(frame.payload, [target], frame.item_bytes)
    return None


def refuse_all() -> None:
    """In a separate process, whose memory is limited to little more than it uses now."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    most = taken + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for what, claim in CLAIMS.items():
        try:
            claim()
        except WeightsError:
            continue
        sys.exit(f"{what}: accepted")


def test_declared_sizes_allocate_nothing() -> None:
    code = "from tests.unit.weights import test_manifest_fuzz; test_manifest_fuzz.refuse_all()"
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
