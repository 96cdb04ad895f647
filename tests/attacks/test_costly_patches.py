# SPDX-License-Identifier: Apache-2.0
"""Deltas come from relays. What a node makes of them for its engines costs no more than it is
worth, and is what the verified file says."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from tests.unit.weights.patch_files import changed_file, tensors_of

from penstock.errors import WeightsError
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.delta import write_delta
from penstock.weights.patches import ChangedFile, write_patch
from penstock.weights.rebuild import apply_chain
from penstock.weights.tensors import Layout, make_layout

NUM = 1 << 20
LAYOUT = make_layout({f"t{number}": ("BF16", (NUM,)) for number in range(4)})


def weights(path: Path, changed: Sequence[int] | slice, layout: Layout = LAYOUT) -> Path:
    """A file whose elements are 1 where they are changed, and else 0."""
    values = np.zeros((layout.num_bytes - len(layout.head)) // 2, "<u2")
    values[changed] = 1
    path.write_bytes(layout.head + values.tobytes())
    return path


def test_changes_that_are_taken_back_fill_no_memory(tmp_path: Path) -> None:
    """Two deltas of some hundred bytes, whose result is right, took sixteen times the file."""
    base = weights(tmp_path / "base", [])
    every, one = weights(tmp_path / "every", slice(None)), weights(tmp_path / "one", [0])
    file = changed_file(one, [base, every, one], tmp_path)
    assert sum(step.bytes for step, _ in file.deltas) < 10_000
    tracemalloc.start()
    try:
        found = write_patch(tmp_path / "patch", [], [file])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is None
    assert peak < LAYOUT.num_bytes / 4


def without_last(file: ChangedFile) -> ChangedFile:
    """The file of the last delta is gone: whoever reads it fails."""
    file.deltas[-1][1].unlink()
    return file


def test_deltas_that_are_too_large_together_end_a_patch_early(tmp_path: Path) -> None:
    """Each takes 18 % of the file; after two no other is read."""
    steps = [weights(tmp_path / "0", [])]
    for number in range(1, 5):
        part = slice(number * NUM // 4, (number + 1) * NUM // 4)
        steps.append(weights(tmp_path / f"{number}", part))
    file = changed_file(steps[-1], steps, tmp_path)
    assert write_patch(tmp_path / "patch", [], [without_last(file)]) is None


def test_files_that_are_too_large_together_end_a_patch_early(tmp_path: Path) -> None:
    files: list[ChangedFile] = []
    for number in range(3):
        base = weights(tmp_path / f"{number}.base", [])
        new = weights(tmp_path / f"{number}", slice(0, NUM))
        files.append(changed_file(new, [base, new], tmp_path))
    assert write_patch(tmp_path / "patch", [], [*files[:2], without_last(files[2])]) is None


def test_a_patch_of_exactly_its_share_is_written(tmp_path: Path) -> None:
    """In each of two steps another part of the elements, one of them in both: six bytes each."""
    num = LAYOUT.num_bytes // 4 // 6
    base, first = weights(tmp_path / "base", []), weights(tmp_path / "first", slice(0, num - 9))
    for end, is_written in ((num, True), (num + 1, False)):
        new = weights(tmp_path / "new.safetensors", slice(1, end))
        file = changed_file(new, [base, first, new], tmp_path)
        found = write_patch(tmp_path / "patch", tensors_of(tmp_path), [file])
        assert (found is not None) == is_written


def test_positions_in_items_of_another_size_make_no_patch(tmp_path: Path) -> None:
    """Applied two elements at a time such a delta gives the right file; its patch changed other
    elements, in tensors that an engine verifies only now and then."""
    layout = make_layout({"t": ("BF16", (1000,))})
    base, new = weights(tmp_path / "base", [], layout), weights(tmp_path / "new", [900], layout)
    digests = [blake3(path.read_bytes()).hexdigest() for path in (base, new)]
    old, now = [memoryview(path.read_bytes())[len(layout.head) :] for path in (base, new)]
    with (tmp_path / "delta").open("wb") as out:
        write_delta(out, digests[0], digests[1], [("t", 4, old, now)])
    delta = tmp_path / "delta"
    blob = blake3(delta.read_bytes()).hexdigest()
    step = DeltaEntry(base=digests[0], target=digests[1], blob=blob, bytes=delta.stat().st_size)
    places = {digests[0]: base, blob: delta}
    apply_chain([step], places.__getitem__, tmp_path / "made")
    assert (tmp_path / "made").read_bytes() == new.read_bytes(), "the delta is valid"
    with pytest.raises(WeightsError, match="items of 4 bytes, not 2"):
        write_patch(tmp_path / "patch", [], [ChangedFile(path=new, deltas=[(step, delta)])])
