# SPDX-License-Identifier: Apache-2.0
"""Pieces of a blob: marks never claim missing bytes, and damage is located."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from blake3 import blake3
from tests.unit.weights.snapshot_folders import weights_bytes

from penstock.weights.manifest import FileEntry
from penstock.weights.pulling import partial as module
from penstock.weights.pulling.partial import Partial, locate_damage, piece_bytes
from penstock.weights.tensors import read_layout, scan

DATA = weights_bytes({"a": (50,), "b": (3, 4), "c": ()}, 1)
FILE = FileEntry(name="x.safetensors", blob=blake3(DATA).hexdigest(), bytes=len(DATA))
PIECE = 64


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MIN_PIECE_BYTES", PIECE)


def begin(tmp_path: Path, file: FileEntry = FILE) -> Partial:
    (tmp_path / "in").touch()
    found = scan(io.BytesIO(DATA), "x.safetensors").tensors
    return Partial(tmp_path / "in", tmp_path / "out", file, {one.name: one for one in found})


def fill(partial: Partial, data: bytes = DATA) -> None:
    for start, end in partial.missing():
        partial.write(start, data[start:end])


def test_pieces_in_any_order_make_the_blob(tmp_path: Path) -> None:
    partial = begin(tmp_path)
    byte_ranges = partial.missing()
    assert len(byte_ranges) > 5 and {end - start for start, end in byte_ranges[:-1]} == {PIECE}
    for start, end in reversed(byte_ranges):
        partial.write(start, DATA[start:end])
        assert (start, end) not in partial.missing()
    found = partial.finish()
    assert found is not None and found.blob == FILE.blob
    assert (tmp_path / "out").read_bytes() == DATA and not (tmp_path / "in").exists()


def exit_at_line(number: int) -> Callable[[FrameType, str, Any], Any]:
    """A tracer that ends this process, as a kill would, before line `number` of `write`."""
    num_lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        if frame.f_code is not Partial.write.__code__:
            return None
        num_lines += event == "line"
        if num_lines == number:
            os._exit(1)
        return trace

    return trace


def test_marked_pieces_survive_a_kill_at_any_moment(tmp_path: Path) -> None:
    start, end = PIECE, 2 * PIECE
    for number in range(1, 100):
        (tmp_path / "in").unlink(missing_ok=True)
        partial = begin(tmp_path)
        partial.missing()
        pid = os.fork()
        if not pid:
            sys.settrace(exit_at_line(number))
            partial.write(start, DATA[start:end])
            os._exit(0)
        is_over = os.waitpid(pid, 0)[1] == 0
        is_there = (tmp_path / "in").read_bytes()[start:end] == DATA[start:end]
        if (start, end) not in begin(tmp_path).missing():
            assert is_there, f"killed before line {number}"
        else:
            assert not is_over
        if is_over:
            return
    pytest.fail("the writer never came to its end")


@pytest.mark.parametrize("left", [b"", b"12", bytes(len(DATA) + 8 + 3), bytes(5000)])
def test_a_partial_with_another_piece_size_is_restarted(tmp_path: Path, left: bytes) -> None:
    (tmp_path / "in").write_bytes(left)
    partial = begin(tmp_path)
    assert partial.missing()[0] == (0, PIECE)
    fill(partial)
    assert partial.finish() is not None


def test_other_pieces_than_before_are_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = begin(tmp_path)
    partial.missing()
    partial.write(0, DATA[:PIECE])
    monkeypatch.setattr(module, "MIN_PIECE_BYTES", 50)
    assert begin(tmp_path).missing()[0] == (0, 50)


def test_only_damaged_tensors_are_missing(tmp_path: Path) -> None:
    layout = read_layout(io.BytesIO(DATA), "x.safetensors")
    start, end = layout.byte_ranges["b"].start, layout.byte_ranges["b"].end
    wrong = DATA[:start] + bytes([DATA[start] ^ 1]) + DATA[start + 1 :]
    partial = begin(tmp_path)
    fill(partial, wrong)
    assert partial.finish() is None
    assert partial.missing() == [(start, end)]
    again = begin(tmp_path)  # in another process, which must read the state from the file
    assert again.is_complete and again.finish() is None
    assert again.missing() == [(start, end)]
    fill(again)
    assert again.finish() is not None


@pytest.mark.parametrize("at", [0, 9, 3])
def test_a_head_that_cannot_be_read_costs_all(tmp_path: Path, at: int) -> None:
    partial = begin(tmp_path)
    fill(partial, DATA[:at] + b"\xff" + DATA[at + 1 :])
    assert partial.finish() is None
    assert partial.missing() == begin(tmp_path).missing()
    assert partial.missing()[0] == (0, PIECE) and partial.missing()[-1][1] == len(DATA)


def test_other_files_are_fetched_in_full(tmp_path: Path) -> None:
    partial = begin(tmp_path, replace(FILE, name="tokenizer.json"))
    fill(partial, DATA[:-1] + b"?")
    assert partial.finish() is None
    assert partial.missing()[0][0] == 0 and partial.missing()[-1][1] == len(DATA)


def test_damage_is_located() -> None:
    layout = read_layout(io.BytesIO(DATA), "x.safetensors")
    found = scan(io.BytesIO(DATA), "x.safetensors").tensors
    right = {one.name: one for one in found}
    head = [(0, len(layout.head))]
    byte_ranges = {
        name: (byte_range.start, byte_range.end) for name, byte_range in layout.byte_ranges.items()
    }

    def blamed(**changes: str) -> list[tuple[int, int]]:
        expected = dict(right)
        for name, digest in changes.items():
            expected[name] = replace(right[name], digest=digest)
        return locate_damage(layout, found, expected)

    assert blamed() == head
    assert blamed(b="0") == [byte_ranges["b"]]
    assert blamed(a="0", c="0") == [byte_ranges["a"], byte_ranges["c"]]
    assert locate_damage(layout, found, {name: right[name] for name in "ab"}) == head
    assert locate_damage(layout, found, right | {"b": replace(right["b"], shape=(4, 3))}) == head


def test_a_piece_is_a_small_part_of_a_large_file() -> None:
    assert piece_bytes(1) == piece_bytes(1000) == PIECE
    assert piece_bytes(1 << 20) == 32 << 10, "as many at once as there are connections"
    assert piece_bytes(8 << 20) == piece_bytes(64 << 20) == 128 << 10
    assert piece_bytes(512 << 20) == 1 << 20
    assert piece_bytes(1 << 40) == 4 << 20
