# SPDX-License-Identifier: Apache-2.0
"""Counts of changes between versions: every type, both signs, NaN, different layouts."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import pytest
from tests.unit.weights.snapshot_folders import safetensors_bytes

from penstock.types import PolicyName
from penstock.weights import compare as module
from penstock.weights.catalog import find_version, read_catalog
from penstock.weights.compare import Comparison, TensorChange, compare
from penstock.weights.publish import put_snapshot
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import ITEM_BYTES

Tensors = dict[str, tuple[str, bytes]]


def compared(tmp_path: Path, *versions: Tensors) -> Comparison:
    for number, tensors in enumerate(versions):
        folder = tmp_path / f"hf-{number}"
        folder.mkdir()
        header: dict[str, object] = {}
        data = b""
        for name, (dtype, raw) in tensors.items():
            end = len(data) + len(raw)
            shape = [len(raw) // ITEM_BYTES[dtype]]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), end]}
            data += raw
        (folder / "model.safetensors").write_bytes(safetensors_bytes(header, data))
        put_snapshot(tmp_path / "store", folder, policy=PolicyName("p"), number=number)
    store = DirectoryStore(tmp_path / "store")
    catalog = read_catalog(store)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return compare(store, find_version(catalog, "0"), find_version(catalog, "1"), scratch)


def change(tmp_path: Path, dtype: str, old: bytes, new: bytes) -> TensorChange:
    [found] = compared(tmp_path, {"w": (dtype, old)}, {"w": (dtype, new)}).changes
    return found


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_float32(tmp_path: Path) -> None:
    found = change(tmp_path, "F32", floats(1.0, -2.0, 5.0, 0.0), floats(1.5, -2.0, 5.0, -0.0))
    assert (found.num_elements, found.num_changed) == (4, 2)
    assert found.max_ulps == 1 << 22
    assert found.max_abs == 0.5


@pytest.mark.parametrize(
    ("dtype", "old", "new", "max_ulps", "max_abs"),
    [
        ("BF16", 0x3F80, 0x3F81, 1, 2.0**-7),
        ("BF16", 0x0001, 0x8001, 2, 2 * 2.0**-133),
        ("F16", 0x3C00, 0x3C02, 2, 2 * 2.0**-10),
        ("F16", 0x8000, 0x0000, 0, 0.0),
        ("I16", 0xFFFF, 0x0002, None, 3.0),
        ("U16", 0xFFFF, 0x0002, None, 65533.0),
    ],
)
def test_two_bytes(
    tmp_path: Path, dtype: str, old: int, new: int, max_ulps: int | None, max_abs: float
) -> None:
    found = change(tmp_path, dtype, struct.pack("<HH", 7, old), struct.pack("<HH", 7, new))
    assert (found.num_changed, found.max_ulps, found.max_abs) == (1, max_ulps, max_abs)


@pytest.mark.parametrize("dtype", ["F8_E4M3", "BOOL", "F64", "I64"])
def test_types_without_a_measure_are_counted(tmp_path: Path, dtype: str) -> None:
    item_bytes = ITEM_BYTES[dtype]
    found = change(
        tmp_path, dtype, bytes(3 * item_bytes), bytes(2 * item_bytes) + b"\1" * item_bytes
    )
    assert (found.num_changed, found.max_ulps, found.max_abs) == (1, None, None)


def test_nan_is_reported(tmp_path: Path) -> None:
    found = change(tmp_path, "F32", floats(1.0, math.inf), floats(math.nan, -math.inf))
    assert found.num_changed == 2
    assert found.max_abs is not None and math.isnan(found.max_abs)


def test_pieces_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE_ITEMS", 7)
    old = [float(number) for number in range(100)]
    new = [value + (0.25 if number % 3 == 0 else 0) for number, value in enumerate(old)]
    found = change(tmp_path, "F32", floats(*old), floats(*new))
    assert (found.num_elements, found.num_changed, found.max_abs) == (100, 34, 0.25)


def test_different_layouts_are_reported(tmp_path: Path) -> None:
    found = compared(
        tmp_path,
        {"same": ("F32", floats(1.0)), "old": ("F32", floats(1.0)), "kind": ("F32", floats(1.0))},
        {"same": ("F32", floats(2.0)), "new": ("F32", floats(1.0)), "kind": ("BF16", b"1234")},
    )
    assert [change.name for change in found.changes] == ["same"]
    assert (found.removed, found.added, found.reshaped) == (("old",), ("new",), ("kind",))
    assert (found.num_changed, found.num_elements) == (1, 1)


def test_unchanged_tensors_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> object:
        raise AssertionError("it was read")

    same: Tensors = {"a": ("F32", floats(1.0, 2.0)), "empty": ("F32", b"")}
    monkeypatch.setattr(module, "layout_of", fail)
    found = compared(tmp_path, same, same)
    assert [(each.num_changed, each.num_elements) for each in found.changes] == [(0, 2), (0, 0)]
