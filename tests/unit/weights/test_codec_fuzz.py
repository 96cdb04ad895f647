# SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile payloads and deltas: WeightsError or some tensor, never anything else."""

from __future__ import annotations

import io
import tracemalloc
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.weights.tensor_pairs import COMPILED, NUMPY, Pair, encode, raw, trained

from penstock.errors import WeightsError
from penstock.weights.deltas.codec import apply_payload
from penstock.weights.deltas.delta import MAGIC, read_delta, write_delta
from penstock.weights.deltas.numpy_kernels import Kernels
from penstock.weights.deltas.payload import Kind, Payload, Role, Stream, pack, unpack

FENCE = 4096
SMALL = trained(3000, 0.05, seed=1)
RARE = trained(40_000, 0.002, seed=2)
RAW = Pair(RARE.base, np.where(RARE.base != RARE.new, np.uint16(0x3F80), RARE.new))
PAIRS = {"small": SMALL, "rare": RARE, "raw": RAW, "wide": trained(3000, 0.05, 3, item_bytes=4)}
PAYLOADS = {name: encode(pair) for name, pair in PAIRS.items()}


def try_apply(payload: Payload, base: NDArray[Any], kernels: Kernels) -> bytes | None:
    """The tensor after the payload, or None if it was rejected; then no bit was changed, inside or
    outside."""
    fenced = bytearray(b"\xa5" * (base.nbytes + 2 * FENCE))
    fenced[FENCE:-FENCE] = raw(base)
    target = memoryview(fenced)[FENCE:-FENCE]
    try:
        apply_payload(payload, [target], base.itemsize, kernels=kernels)
    except WeightsError:
        assert target == raw(base)
        return None
    finally:
        assert fenced[:FENCE] == fenced[-FENCE:] == b"\xa5" * FENCE
    return bytes(target)


def try_both(payload: Payload, base: NDArray[Any]) -> bytes | None:
    plain = try_apply(payload, base, NUMPY)
    assert try_apply(payload, base, COMPILED) == plain
    return plain


@pytest.mark.parametrize("name", PAIRS)
def test_the_undamaged_ones_are_what_these_tests_damage(name: str) -> None:
    assert PAYLOADS[name].kind is Kind.SPARSE
    assert try_both(PAYLOADS[name], PAIRS[name].base) == PAIRS[name].new.tobytes()


def test_every_role_is_damaged_here() -> None:
    found = {stream.role for payload in PAYLOADS.values() for stream in payload.streams}
    assert found == set(Role) - {Role.FULL}


# --- payloads ------------------------------------------------------------------------------------


def mutate(draw: st.DrawFn, data: bytes) -> bytes:
    damaged = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        if damaged:
            damaged[draw(st.integers(0, len(damaged) - 1))] = draw(st.integers(0, 255))
    match draw(st.integers(0, 4)):
        case 0:
            del damaged[draw(st.integers(0, len(damaged))) :]
        case 1:
            damaged += draw(st.binary(max_size=9))
        case _:
            pass
    return bytes(damaged)


@st.composite
def damaged_payloads(draw: st.DrawFn) -> tuple[str, Payload]:
    """One stream damaged inside or outside its zstd frame, or with another size or role."""
    name = draw(st.sampled_from(sorted(PAIRS)))
    payload = PAYLOADS[name]
    streams = list(payload.streams)
    number = draw(st.integers(0, len(streams) - 1))
    stream = streams[number]
    match draw(st.integers(0, 6)):
        case 0:
            streams[number] = replace(stream, data=mutate(draw, bytes(stream.data)))
        case 1 | 2:
            inside = mutate(draw, unpack(stream).tobytes())
            streams[number] = pack(stream.role, memoryview(inside))
        case 3:
            streams[number] = replace(stream, num_bytes=draw(st.integers(0, 1 << 62)))
        case 4:
            streams[number] = replace(stream, role=draw(st.sampled_from(Role)))
        case 5:
            streams.append(streams[draw(st.integers(0, len(streams) - 1))])
        case _:
            del streams[number]
    num_changed = payload.num_changed
    if draw(st.integers(0, 9)) == 0:
        num_changed = draw(st.one_of(st.integers(0, 50_000), st.integers()))
    kind = draw(st.sampled_from([payload.kind] * 9 + [Kind.FULL, Kind.SAME]))
    return name, Payload(kind=kind, num_changed=num_changed, streams=tuple(streams))


@given(damaged=damaged_payloads())
@settings(deadline=None, max_examples=400)
def test_damaged_payloads_are_refused_or_harmless(damaged: tuple[str, Payload]) -> None:
    name, payload = damaged
    try_both(payload, PAIRS[name].base)


@given(
    streams=st.lists(
        st.tuples(st.sampled_from(Role), st.integers(0, 64), st.binary(max_size=64)), max_size=8
    ),
    num_changed=st.integers(0, 64),
    kind=st.sampled_from(Kind),
    item_bytes=st.sampled_from([2, 4]),
)
@settings(deadline=None, max_examples=300)
def test_made_up_payloads_are_refused_or_harmless(
    streams: list[tuple[Role, int, bytes]], num_changed: int, kind: Kind, item_bytes: int
) -> None:
    payload = Payload(
        kind=kind,
        num_changed=num_changed,
        streams=tuple(Stream(role=role, num_bytes=n, data=data) for role, n, data in streams),
    )
    try_both(payload, np.arange(64, dtype=f"<u{item_bytes}"))


def plain(role: Role, *values: int) -> Stream:
    return Stream(role=role, num_bytes=len(values), data=bytes(values))


GAPS, LONG_GAPS, LOW_BITS, CODES, LARGE_CODES, VALUES, FULL = (
    partial(plain, role) for role in Role
)


@pytest.mark.parametrize(
    ("why", "num_changed", "streams"),
    [
        ("outside the tensor", 1, [GAPS(64), CODES(0)]),
        ("outside the tensor", 2, [GAPS(62, 1), CODES(0)]),
        ("outside the tensor", 1, [GAPS(16), LOW_BITS(0), CODES(0)]),
        ("outside the tensor", 1, [GAPS(15), LOW_BITS(3), LOW_BITS(1), CODES(0)]),
        ("outside the tensor", 1, [GAPS(255), *[LONG_GAPS(255)] * 5, CODES(0)]),
        ("long_gaps", 1, [GAPS(255), *[LONG_GAPS(0)] * 6, CODES(0)]),
        ("long_gaps", 1, [GAPS(255), CODES(0)]),
        ("long_gaps", 1, [GAPS(25), LONG_GAPS(1), CODES(0)]),
        ("long_gaps", 1, [GAPS(255), LONG_GAPS(1, 2), CODES(0)]),
        ("low_bits", 1, [GAPS(0), *[LOW_BITS(0)] * 5, CODES(0)]),
        ("padding", 1, [GAPS(0), LOW_BITS(4), CODES(0)]),
        ("padding", 1, [GAPS(0), CODES(4)]),
        ("large_codes", 1, [GAPS(0), CODES(3)]),
        ("large_codes", 1, [GAPS(0), CODES(0), LARGE_CODES(0)]),
        ("large_codes", 1, [GAPS(0), CODES(3), *[LARGE_CODES(0)] * 3]),
        ("does not fit", 1, [GAPS(0), CODES(3), LARGE_CODES(252), LARGE_CODES(255)]),
        ("codes", 1, [GAPS(0)]),
        ("gaps", 1, [CODES(0)]),
        ("values", 1, [GAPS(0), *[VALUES(0)] * 3]),
        ("combination", 1, [GAPS(0), VALUES(0), CODES(0)]),
        ("combination", 1, [GAPS(0), CODES(0), FULL(0)]),
        ("changes in", 0, []),
        ("changes in", 65, [GAPS(*[0] * 65), CODES(*[0] * 17)]),
        ("larger than the tensor", 64, [GAPS(*[0] * 64), CODES(*[0] * 16), *[LARGE_CODES(0)] * 64]),
    ],
)  # fmt: skip
def test_refused_with_the_reason(why: str, num_changed: int, streams: list[Stream]) -> None:
    base = np.arange(64, dtype=np.uint16)
    payload = Payload(kind=Kind.SPARSE, num_changed=num_changed, streams=tuple(streams))
    with pytest.raises(WeightsError, match=why):
        apply_payload(payload, [raw(base)], 2)
    assert np.array_equal(base, np.arange(64))


def test_the_largest_difference_is_allowed() -> None:
    streams = (
        GAPS(0),
        CODES(3),
        LARGE_CODES(251),
        LARGE_CODES(255),
    )
    payload = Payload(kind=Kind.SPARSE, num_changed=1, streams=streams)
    assert try_both(payload, np.zeros(64, np.uint16)) is not None


def test_a_sparse_payload_fits_no_other_item_size() -> None:
    for item_bytes in (1, 3, 8):
        with pytest.raises(WeightsError, match="unsupported item size"):
            apply_payload(PAYLOADS["small"], [raw(SMALL.base.copy())], item_bytes)
    with pytest.raises(WeightsError, match="unsupported item size"):
        apply_payload(PAYLOADS["small"], [memoryview(bytearray(6001))], 2)


def test_full_is_for_one_tensor_of_its_size() -> None:
    full = Payload(kind=Kind.FULL, num_changed=0, streams=(FULL(1, 2),))
    for targets in ([], [bytearray(3)], [bytearray(1), bytearray(1)]):
        with pytest.raises(WeightsError, match="full payload"):
            apply_payload(full, [memoryview(target) for target in targets], 2)


def test_unchanged_tensors_have_no_changes() -> None:
    for kind, num_changed, streams in (
        (Kind.SAME, 1, ()),
        (Kind.SAME, 0, (GAPS(),)),
        (Kind.FULL, 1, (FULL(1, 2),)),
    ):
        with pytest.raises(WeightsError):
            apply_payload(
                Payload(kind=kind, num_changed=num_changed, streams=streams),
                [memoryview(bytearray(2))],
                2,
            )


def test_nothing_follows_a_zstd_frame() -> None:
    stream = pack(Role.FULL, memoryview(bytes(1000)))
    assert len(unpack(stream)) == 1000
    with pytest.raises(WeightsError, match="damaged"):
        unpack(replace(stream, data=bytes(stream.data) + b"x"))


def test_zstd_bombs_are_not_unpacked() -> None:
    """Neither a frame that declares its size nor one that omits it."""
    num_bytes = 1 << 28
    bomb = zstandard.ZstdCompressor().compress(bytes(num_bytes))
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(num_bytes))
    target = bytearray(1 << 20)
    for data in (bomb, hidden):
        stream = Stream(role=Role.FULL, num_bytes=len(target), data=data)
        tracemalloc.start()
        with pytest.raises(WeightsError, match="zstd frame declares"):
            apply_payload(
                Payload(kind=Kind.FULL, num_changed=0, streams=(stream,)), [memoryview(target)], 2
            )
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


# --- deltas --------------------------------------------------------------------------------------


TENSORS = {
    "a": SMALL,
    "b": RARE,
    "c": Pair(SMALL.base[:99], SMALL.new[:99] ^ np.uint16(0x5555)),
    "d": PAIRS["wide"],
}
SIZES = {name: pair.new.nbytes for name, pair in TENSORS.items()}
_out = io.BytesIO()
write_delta(
    _out,
    "a" * 64,
    "b" * 64,
    [(name, pair.item_bytes, raw(pair.base), raw(pair.new)) for name, pair in TENSORS.items()],
)
DELTA = _out.getvalue()
HEADER_BYTES = len(MAGIC) + 4 + int.from_bytes(DELTA[len(MAGIC) : len(MAGIC) + 4], "little")


def try_delta(data: bytes) -> dict[str, NDArray[Any]] | None:
    made = {name: pair.base.copy() for name, pair in TENSORS.items()}
    tracemalloc.start()
    try:
        _, frames = read_delta(io.BytesIO(data), SIZES)
        for frame in frames:
            targets = [raw(made[name]) for name in frame.names]
            apply_payload(frame.payload, targets, frame.item_bytes)
    except WeightsError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2 * sum(SIZES.values()) + (2 << 20)
    return made


def test_the_undamaged_delta_is_right() -> None:
    made = try_delta(DELTA)
    assert made is not None
    assert all(np.array_equal(made[name], pair.new) for name, pair in TENSORS.items())


@st.composite
def damaged_deltas(draw: st.DrawFn) -> bytes:
    """Damage to a delta, mostly after the header, whose damage is detected early."""
    start = draw(st.sampled_from([0, HEADER_BYTES, HEADER_BYTES]))
    return DELTA[:start] + mutate(draw, DELTA[start:])


@given(data=damaged_deltas())
@settings(deadline=None, max_examples=400)
def test_damaged_deltas_are_refused_or_harmless(data: bytes) -> None:
    try_delta(data)


@given(data=st.binary(max_size=300))
@settings(deadline=None, max_examples=300)
def test_made_up_frames_are_refused(data: bytes) -> None:
    assert try_delta(DELTA[:HEADER_BYTES] + data) is None
