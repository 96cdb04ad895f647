# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tests.unit.weights.snapshot_folders import TENSORS, safetensors_bytes, weights_bytes

from penstock.errors import WeightsError
from penstock.weights import tensors
from penstock.weights.manifest import FileEntry
from penstock.weights.pulling.partial import verify
from penstock.weights.tensors import MAX_HEADER_BYTES, has_content, scan


def scan_bytes(data: bytes, name: str = "model.safetensors") -> tensors.Scan:
    return scan(io.BytesIO(data), name)


def entry(start: int, end: int, *, dtype: str = "F32", shape: object = None) -> dict[str, object]:
    return {
        "dtype": dtype,
        "shape": [(end - start) // 4] if shape is None else shape,
        "data_offsets": [start, end],
    }


def test_every_tensor_has_the_digest_of_its_own_bytes() -> None:
    data = weights_bytes(TENSORS, 1)
    found = scan_bytes(data)
    assert found.blob == blake3(data).hexdigest()
    assert found.num_bytes == len(data)
    assert {tensor.name: tensor.shape for tensor in found.tensors} == TENSORS
    body = data[8 + struct.unpack("<Q", data[:8])[0] :]
    assert found.tensors[0].digest == blake3(body[: 4 * 88]).hexdigest()
    assert found.tensors[1].digest == blake3(body[4 * 88 : 4 * 96]).hexdigest()


def test_pieces_smaller_than_a_tensor_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = weights_bytes(TENSORS, 1)
    whole = scan_bytes(data)
    monkeypatch.setattr(tensors, "PIECE_BYTES", 5)
    assert scan_bytes(data) == whole


def test_the_sink_gets_exactly_the_bytes() -> None:
    for name in ("model.safetensors", "tokenizer.json"):
        data = weights_bytes(TENSORS, 2)
        copy = bytearray()
        scan(io.BytesIO(data), name, copy.extend)
        assert bytes(copy) == data


def test_an_empty_tensor_is_a_tensor() -> None:
    data = safetensors_bytes({"a": entry(0, 0, shape=[0, 3]), "b": entry(0, 4)}, b"1234")
    assert [tensor.name for tensor in scan_bytes(data).tensors] == ["a", "b"]


HOSTILE = {
    "empty file": b"",
    "shorter than its length field": b"\0\0\0",
    "header longer than allowed": struct.pack("<Q", MAX_HEADER_BYTES + 1) + b"{}",
    "header of 2**63 bytes": struct.pack("<Q", 1 << 63) + b"{}",
    "header longer than the file": struct.pack("<Q", 1000) + b"{}",
    "no JSON": safetensors_bytes(b"{nope}", b""),
    "a list": safetensors_bytes(b"[1,2]", b""),
    "deep nesting": safetensors_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b""),
    "a pickle": b"\x80\x05\x95" + bytes(40),
    "overlap": safetensors_bytes({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
    "gap": safetensors_bytes({"a": entry(0, 4), "b": entry(8, 12)}, bytes(12)),
    "late start": safetensors_bytes({"a": entry(4, 8)}, bytes(8)),
    "backwards": safetensors_bytes({"a": entry(8, 4, shape=[1])}, bytes(8)),
    "negative": safetensors_bytes({"a": entry(-4, 0)}, bytes(8)),
    "beyond the end": safetensors_bytes({"a": entry(0, 4000)}, bytes(8)),
    "bytes after the last tensor": safetensors_bytes({"a": entry(0, 4)}, bytes(5)),
    "shape times item size": safetensors_bytes({"a": entry(0, 8, shape=[3])}, bytes(8)),
    "negative sizes": safetensors_bytes({"a": entry(0, 8, shape=[-1, -2])}, bytes(8)),
    "huge sizes": safetensors_bytes({"a": entry(0, 0, shape=[1 << 60, 0])}, b""),
    "too many sizes": safetensors_bytes({"a": entry(0, 4, shape=[1] * 17)}, bytes(4)),
    "unknown dtype": safetensors_bytes({"a": entry(0, 4, dtype="object")}, bytes(4)),
    "blank in a name": safetensors_bytes({"a b": entry(0, 4)}, bytes(4)),
    "newline in a name": safetensors_bytes({"a\n": entry(0, 4)}, bytes(4)),
    "long name": safetensors_bytes({"a" * 257: entry(0, 4)}, bytes(4)),
    "same name twice": safetensors_bytes(
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        bytes(2),
    ),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_file_is_refused(data: bytes) -> None:
    with pytest.raises(WeightsError):
        scan_bytes(data)


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_by_name_of_the_error(noise: bytes) -> None:
    with pytest.raises(WeightsError):
        scan_bytes(struct.pack("<Q", max(0, len(noise) - 8)) + noise)


DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.text('ab."\\0', min_size=1, max_size=6),
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 3), max_size=3)),
        max_size=6,
    )
)
def test_the_layout_is_the_one_that_safetensors_writes(
    shapes: dict[str, tuple[str, list[int]]],
) -> None:
    made = tensors.make_layout({n: (dtype, tuple(shape)) for n, (dtype, shape) in shapes.items()})
    content = {n: torch.zeros(shape, dtype=DTYPES[dtype]) for n, (dtype, shape) in shapes.items()}
    data = save(content, {"format": "pt"})
    assert data.startswith(made.head) and len(data) == made.num_bytes
    assert made == tensors.read_layout(io.BytesIO(data), "model.safetensors")


WHOLE = {"a": torch.arange(40.0), "b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.empty(0)}


def test_digests_of_tensors_leave_no_byte_of_their_file_open(tmp_path: Path) -> None:
    data = save(WHOLE, {"format": "pt"})
    found = scan_bytes(data).tensors
    path = tmp_path / "one"

    def is_content(content: bytes) -> bool:
        path.write_bytes(content)
        with path.open("rb") as file:
            return has_content(file, found)

    assert is_content(data)
    for at in range(len(data)):
        assert not is_content(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]), at
    assert not is_content(data[:-1]) and not is_content(data + b"x") and not is_content(b"")
    assert not is_content(save(WHOLE, {"format": "np"}))


def test_a_file_that_its_tensors_determine_is_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    def counting(num_bytes: int) -> blake3:
        sizes.append(num_bytes)
        return blake3()

    data = save(WHOLE, {"format": "pt"})
    found = scan_bytes(data)
    path = tmp_path / "one"
    path.write_bytes(data)
    monkeypatch.setattr(tensors, "new_hash", counting)
    file = FileEntry(name="model.safetensors", blob=found.blob, bytes=len(data))
    proven = verify(path, file, found.tensors)
    assert proven == replace(found, mtime_ns=path.stat().st_mtime_ns)
    assert sum(sizes) == sum(tensor.nbytes for tensor in WHOLE.values())
    sizes.clear()
    assert verify(path, file) == found and sum(sizes) > len(data)  # with the head, and twice
