# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import struct
from typing import Any, BinaryIO, cast

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.weights.tensor_pairs import Pair, pairs, raw, trained, weights

from penstock.errors import WeightsError
from penstock.weights.deltas import delta
from penstock.weights.deltas.codec import apply_payload, encode_full
from penstock.weights.deltas.delta import MAGIC, Frame, Tensor, read_delta, write_delta
from penstock.weights.deltas.payload import Kind

BASE, TARGET = "a" * 64, "b" * 64
Tensors = dict[str, tuple[NDArray[Any] | None, NDArray[Any]]]


def listed(tensors: Tensors) -> list[Tensor]:
    return [
        (name, new.itemsize, None if base is None else raw(base), raw(new))
        for name, (base, new) in tensors.items()
    ]


def sizes_of(tensors: Tensors) -> dict[str, int]:
    return {name: new.nbytes for name, (_, new) in tensors.items()}


def written(tensors: Tensors) -> bytes:
    out = io.BytesIO()
    write_delta(out, BASE, TARGET, listed(tensors))
    return out.getvalue()


def rebuild(source: BinaryIO, tensors: Tensors) -> dict[str, NDArray[Any]]:
    """What a node has after the delta."""
    header, frames = read_delta(source, sizes_of(tensors))
    assert (header.base, header.target) == (BASE, TARGET)
    made = {
        name: np.zeros_like(new) if base is None or base.nbytes != new.nbytes else base.copy()
        for name, (base, new) in tensors.items()
    }
    for frame in frames:
        apply_payload(frame.payload, [raw(made[name]) for name in frame.names], frame.item_bytes)
    return made


def frames_of(data: bytes, tensors: Tensors) -> list[Frame]:
    return list(read_delta(io.BytesIO(data), sizes_of(tensors))[1])


def model() -> Tensors:
    """Large and small, dense and still, two item sizes, new and resized."""
    tensors: Tensors = {}
    for layer in range(3):
        for part, size, density, item_bytes in (
            ("up", 30_000, 0.01, 2),
            ("norm", 64, 0.02, 4),
            ("router", 2_000, 0.6, 4),
            ("frozen", 1_000, 0.0, 2),
        ):
            pair = trained(size, density, layer, item_bytes)
            tensors[f"layers.{layer}.{part}"] = (pair.base, pair.new)
    tensors["added"] = (None, weights(100, 7))
    tensors["grown"] = (weights(100, 8), weights(120, 8))
    tensors["steps"] = (np.arange(3), np.arange(3) + 1)
    tensors["empty"] = (weights(0, 1), weights(0, 1))
    return tensors


def assert_equal(made: dict[str, NDArray[Any]], tensors: Tensors) -> None:
    assert made.keys() == tensors.keys()
    for name, (_, new) in tensors.items():
        assert np.array_equal(made[name], new), name


def test_a_version_becomes_the_next() -> None:
    tensors = model()
    assert_equal(rebuild(io.BytesIO(written(tensors)), tensors), tensors)


@given(some=st.lists(pairs(), max_size=6))
@settings(deadline=None, max_examples=50)
def test_any_tensors_come_back_and_never_cost_more_than_themselves(some: list[Pair]) -> None:
    tensors: Tensors = {f"t{n}": (pair.base, pair.new) for n, pair in enumerate(some)}
    data = written(tensors)
    assert_equal(rebuild(io.BytesIO(data), tensors), tensors)
    for n, pair in enumerate(some):
        alone: Tensors = {f"t{n}": (pair.base, pair.new)}
        header = len(written({}))
        assert len(written(alone)) <= header + 1.01 * pair.new.nbytes + 64


def test_the_same_tensors_give_the_same_bytes() -> None:
    assert written(model()) == written(model())


def test_an_unchanged_model_is_a_few_bytes() -> None:
    tensors: Tensors = {
        f"model.layers.{n}.up": (weights(999, n), weights(999, n)) for n in range(300)
    }
    data = written(tensors)
    (frame,) = frames_of(data, tensors)
    assert frame.payload.kind is Kind.SAME and len(frame.names) == 300
    assert len(data) < 300 * 8


def test_tied_tensors_are_one_object_twice() -> None:
    pair = trained(5000, 0.01, seed=1)
    tensors: Tensors = dict.fromkeys(("embed", "lm_head"), (pair.base, pair.new))
    assert_equal(rebuild(io.BytesIO(written(tensors)), tensors), tensors)


def test_much_changed_tensors_do_not_share() -> None:
    tensors = model()
    for frame in frames_of(written(tensors), tensors):
        if len(frame.names) > 1:
            assert not any("router" in name for name in frame.names)
            assert len({tensors[name][1].itemsize for name in frame.names}) == 1


def test_frames_are_closed_when_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = model()
    few = len(frames_of(written(tensors), tensors))
    monkeypatch.setattr(delta, "SHARED_FRAME_BYTES", 1)
    data = written(tensors)
    assert len(frames_of(data, tensors)) == len(tensors) > few
    assert_equal(rebuild(io.BytesIO(data), tensors), tensors)
    monkeypatch.setattr(delta, "SHARED_FRAME_BYTES", 1 << 30)
    monkeypatch.setattr(delta, "MAX_FRAME_TENSORS", 2)
    assert max(len(frame.names) for frame in frames_of(written(tensors), tensors)) == 2


def test_tensors_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model does not fit in memory twice: few tensors are asked for before frames are written."""
    monkeypatch.setattr(delta, "AHEAD_BYTES", 350)
    num_taken = 0

    class Out(io.BytesIO):
        most_ahead = 0
        num_frames = 0

        def write(self, data: Any) -> int:
            if len(data) == 8:
                self.num_frames += 1
                self.most_ahead = max(self.most_ahead, num_taken - self.num_frames)
            return super().write(data)

    def lazily() -> Any:
        nonlocal num_taken
        for tensor in listed({f"t{n}": (None, weights(50, n)) for n in range(20)}):
            num_taken += 1
            yield tensor

    out = Out()
    write_delta(out, BASE, TARGET, lazily())
    assert out.num_frames == 21 and out.most_ahead <= 3


def test_frames_are_read_while_bytes_arrive() -> None:
    tensors: Tensors = {f"t{n}": (None, weights(50_000, n)) for n in range(4)}
    source = io.BytesIO(written(tensors))
    _, frames = read_delta(source, sizes_of(tensors))
    assert next(frames).names == ("t0",)
    assert source.tell() < 100_000


class TrickleReader(io.RawIOBase):
    """Gives few bytes at a time, as a socket does."""

    def __init__(self, data: bytes) -> None:
        self._source = io.BytesIO(data)

    def read(self, size: int = -1, /) -> bytes:
        return self._source.read(min(size, 7))


def test_short_reads_are_continued() -> None:
    tensors = model()
    source = cast(BinaryIO, TrickleReader(written(tensors)))
    assert_equal(rebuild(source, tensors), tensors)


# --- refusals ------------------------------------------------------------------------------------


def with_header(**changed: object) -> bytes:
    header = msgspec.json.encode({"format": 1, "base": BASE, "target": TARGET, **changed})
    return MAGIC + struct.pack("<I", len(header)) + header


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"x" * 100, "not a weight delta"),
        (MAGIC + b"\xff" * 8, "header of 4294967295"),
        (MAGIC + b"\x02\0\0\0[]", "damaged"),
        (with_header(format=2), "format 2"),
        (with_header(base="../x"), "invalid digests"),
        (with_header(target=""), "invalid digests"),
        (with_header() + b"\0" * 8 + b"x", "after the end"),
        (with_header() + struct.pack("<II", 1, 2), "frame head size 1 "),
        (with_header() + struct.pack("<II", 1 << 31, 2), "frame head size 2147483648"),
        (with_header() + struct.pack("<II", 3, 3) + b"abc", "damaged"),
    ],
)
def test_what_is_no_delta_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(WeightsError, match=why):
        frames_of(data, {})


def test_every_cut_is_noticed() -> None:
    tensors: Tensors = {"a": (None, weights(9, 1)), "b": (weights(300, 1), weights(300, 2))}
    data = written(tensors)
    for length in range(len(data)):
        with pytest.raises(WeightsError):
            frames_of(data[:length], tensors)


def test_only_the_tensors_of_the_version_each_once() -> None:
    one, two = weights(9, 1), weights(9, 2)
    data = written({"a": (None, one), "b": (None, two)})
    with pytest.raises(WeightsError, match="'b' is repeated or not"):
        frames_of(data, {"a": (None, one)})
    with pytest.raises(WeightsError, match="1 tensors are missing, such as c"):
        frames_of(data, {"a": (None, one), "b": (None, two), "c": (None, two)})
    for base in (None, raw(one)):  # in frames of their own, and in one
        out = io.BytesIO()
        write_delta(out, BASE, TARGET, [("a", 2, base, raw(one))] * 2)
        with pytest.raises(WeightsError, match="'a' is repeated"):
            frames_of(out.getvalue(), {"a": (None, one)})


def test_a_stream_longer_than_its_tensor_is_not_read() -> None:
    data = written({"a": (None, weights(1000, 1))})
    with pytest.raises(WeightsError, match="streams of 2000 bytes"):
        frames_of(data, {"a": (None, weights(999, 1))})
    assert encode_full(raw(weights(1000, 1))).size <= 2000


@pytest.mark.parametrize(
    "streams", [[[6, 18, 1 << 40]], [[6, 18, -1]], [[6, -(1 << 40), -(1 << 40)], [6, 1 << 40, 9]]]
)
def test_impossible_sizes_are_not_read(streams: list[list[int]]) -> None:
    head = msgspec.msgpack.encode([["a"], 2, "full", 0, streams])
    data = with_header() + struct.pack("<II", len(head), len(head)) + head + bytes(100)
    with pytest.raises(WeightsError, match="invalid sizes"):
        frames_of(data, {"a": (None, weights(9, 1))})
