# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import WeightsError
from penstock.types import PolicyName
from penstock.weights import manifest as module
from penstock.weights.manifest import (
    FileEntry,
    SnapshotManifest,
    base_digest,
    digest_of,
    encode_manifest,
    make_manifest,
    parse_manifest,
    weights_digest,
)
from penstock.weights.tensors import TensorEntry

A, B, C = (digest_of(text) for text in (b"a", b"b", b"c"))
FILES = [
    FileEntry(name="model.safetensors", blob=A, bytes=100),
    FileEntry(name="config.json", blob=B, bytes=3),
]
TENSORS = [
    TensorEntry(name="w", dtype="F32", shape=(2, 3), digest=C),
    TensorEntry(name="b", dtype="BF16", shape=(), digest=B),
]


def make() -> SnapshotManifest:
    return make_manifest(PolicyName("solver"), 3, FILES, TENSORS)


def changed(change: Callable[[dict[str, Any]], object]) -> bytes:
    value = json.loads(encode_manifest(make()))
    change(value)
    return json.dumps(value).encode()


def test_bytes_are_canonical() -> None:
    data = encode_manifest(make())
    plain = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    assert data == plain
    again = make_manifest(PolicyName("solver"), 3, FILES[::-1], TENSORS[::-1])
    assert encode_manifest(again) == data
    assert parse_manifest(data) == make()


def test_the_shape_is_that_of_the_protocol() -> None:
    value = json.loads(encode_manifest(make()))
    assert set(value) == {"format", "policy", "number", "files", "tensors", "weights_digest"}
    assert value["files"][0] == {"name": "config.json", "blob": B, "bytes": 3}
    assert value["tensors"][1] == {"name": "w", "dtype": "F32", "shape": [2, 3], "digest": C}


ADAPTER = [
    FileEntry(name="adapter_model.safetensors", blob=A, bytes=100),
    FileEntry(name="adapter_config.json", blob=B, bytes=3),
]


def make_adapter() -> SnapshotManifest:
    return make_manifest(PolicyName("solver"), 3, ADAPTER, TENSORS, base=C)


def test_a_base_is_written_by_adapters_alone() -> None:
    data = encode_manifest(make_adapter())
    assert json.loads(data)["base"] == C
    plain = json.dumps(json.loads(data), sort_keys=True, separators=(",", ":")).encode()
    assert data == plain
    assert parse_manifest(data) == make_adapter()
    assert make_adapter().is_adapter and not make().is_adapter
    empty = changed(lambda m: m.update(base=""))
    assert encode_manifest(parse_manifest(empty)) == encode_manifest(make())


ADAPTER_CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "adapter without a base": lambda m: m.pop("base"),
    "adapter with an empty base": lambda m: m.update(base=""),
    "base is a name": lambda m: m.update(base="HuggingFaceTB/SmolLM2-135M"),
    "base in capitals": lambda m: m.update(base=C.upper()),
    "base is a number": lambda m: m.update(base=7),
    "no config": lambda m: m["files"].pop(0),
    "weights of another name": lambda m: m["files"][1].update(name="model.safetensors"),
    "weights of a whole model beside it": lambda m: m["files"].append(
        {"name": "model.safetensors", "blob": A, "bytes": 100}
    ),
}


@pytest.mark.parametrize("change", ADAPTER_CHANGES.values(), ids=ADAPTER_CHANGES.keys())
def test_an_adapter_that_lies_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(encode_manifest(make_adapter()))
    change(value)
    with pytest.raises(WeightsError):
        parse_manifest(json.dumps(value).encode())


LORA_TENSORS = [
    TensorEntry(name=f"base_model.model.w.lora_{part}.weight", dtype="F32", shape=(2, 2), digest=A)
    for part in "AB"
]


def test_an_adapter_may_stand_beside_its_model_and_no_other() -> None:
    """The tensors say which model that is."""
    base = make().weights_digest
    assert base_digest([*TENSORS, *LORA_TENSORS]) == base
    both = (PolicyName("solver"), 3, FILES + ADAPTER, TENSORS + LORA_TENSORS)
    found = make_manifest(*both, base=base)
    assert parse_manifest(encode_manifest(found)) == found and found.is_adapter
    with pytest.raises(WeightsError, match="do not match its base"):
        make_manifest(*both, base=found.weights_digest)
    with pytest.raises(WeightsError, match="an adapter needs both"):
        make_manifest(*both)


def test_the_weights_digest_is_over_sorted_lines() -> None:
    expected = blake3(f"b BF16  {B}\nw F32 2x3 {C}\n".encode()).hexdigest()
    assert weights_digest(TENSORS) == expected == make().weights_digest


def test_a_manifest_of_a_foreign_writer_needs_no_canonical_form() -> None:
    value = json.loads(encode_manifest(make()))
    assert parse_manifest(json.dumps(value, indent=2).encode()) == make()


FILE_NAMES = [
    "",
    ".",
    "..",
    "../up.json",
    "/etc/passwd.json",
    "a/b.json",
    "a\\b.json",
    ".hidden.json",
    "a\0.json",
    "a\n.json",
    "ä.json",
    "x" * 129 + ".json",
    "modeling_evil.py",
    "pytorch_model.bin",
    "weights.pt",
    "no_suffix",
]


@pytest.mark.parametrize("name", FILE_NAMES)
def test_a_file_name_that_could_do_harm_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="is not allowed in a snapshot"):
        parse_manifest(changed(lambda m: m["files"][0].update(name=name)))


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another format": lambda m: m.update(format=2),
    "no files": lambda m: m.update(files=[]),
    "no weights": lambda m: m["files"].pop(),
    "file twice": lambda m: m["files"].append(m["files"][0]),
    "digest of a file in capitals": lambda m: m["files"][0].update(blob=B.upper()),
    "digest of a file is a path": lambda m: m["files"][0].update(blob="../../" + B[6:]),
    "negative size": lambda m: m["files"][0].update(bytes=-1),
    "enormous size": lambda m: m["files"][0].update(bytes=1 << 60),
    "size is a float": lambda m: m["files"][0].update(bytes=3.5),
    "policy is a path": lambda m: m.update(policy="../x"),
    "negative number": lambda m: m.update(number=-1),
    "number is a flag": lambda m: m.update(number=True),
    "tensor twice": lambda m: m["tensors"].append(m["tensors"][0]),
    "tensor missing": lambda m: m["tensors"].pop(),
    "tensor of another shape": lambda m: m["tensors"][1].update(shape=[3, 2]),
    "tensor of another dtype": lambda m: m["tensors"][1].update(dtype="I32"),
    "dtype unknown": lambda m: m["tensors"][1].update(dtype="object"),
    "negative shape": lambda m: m["tensors"][1].update(shape=[-2, -3]),
    "bad tensor digest": lambda m: m["tensors"][1].update(digest="0"),
    "newline in a tensor's name": lambda m: m["tensors"][1].update(name="w\n"),
    "other weights digest": lambda m: m.update(weights_digest=A),
    "base of a whole model": lambda m: m.update(base=A),
    "key missing": lambda m: m.pop("weights_digest"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_manifest_that_lies_is_refused(change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(WeightsError):
        parse_manifest(changed(change))


def test_a_manifest_over_the_limit_is_not_even_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_manifest(make())
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", len(data) - 1)
    with pytest.raises(WeightsError, match="exceeds the limit"):
        parse_manifest(data)


@given(st.binary(max_size=300))
def test_random_bytes_are_no_manifest(noise: bytes) -> None:
    with pytest.raises(WeightsError):
        parse_manifest(noise)


def test_deep_nesting_is_an_error_not_a_crash() -> None:
    with pytest.raises(WeightsError):
        parse_manifest(b"[" * 1_000_000)
