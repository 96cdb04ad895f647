# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.weights.tensor_pairs import (
    COMPILED,
    NUMPY,
    ODD_BITS,
    Pair,
    applied,
    encode,
    encode_tensor,
    pairs,
    raw,
    trained,
    weights,
)

from penstock.weights.deltas import codec, numpy_kernels, sparse
from penstock.weights.deltas.codec import (
    apply_payload,
    best_kernels,
    diff_tensor,
    encode_diffs,
    encode_one,
)
from penstock.weights.deltas.delta import write_delta
from penstock.weights.deltas.numba_kernels import NumbaKernels
from penstock.weights.deltas.numpy_kernels import (
    Changes,
    Kernels,
    join_gaps,
    unchanged,
)
from penstock.weights.deltas.payload import Kind, Payload, Role, pack, pack_pieces, unpack
from penstock.weights.tensors import NUM_THREADS

BOTH = pytest.mark.parametrize("kernels", [NUMPY, COMPILED], ids=["numpy", "compiled"])


def always(kernels: Kernels, num_bytes: int) -> Kernels:
    return kernels


def roles(payload: Payload) -> list[Role]:
    return [stream.role for stream in payload.streams]


# --- exactness -----------------------------------------------------------------------------------


@given(pair=pairs())
@settings(deadline=None)
def test_every_bit_is_restored_and_both_kernels_agree(pair: Pair) -> None:
    payload = encode(pair, NUMPY)
    assert payload == encode(pair, COMPILED)
    for kernels in (NUMPY, COMPILED):
        assert np.array_equal(applied(payload, pair, kernels), pair.new)
    assert payload.size <= pair.new.nbytes
    assert (payload.kind is Kind.SAME) == bool(np.array_equal(pair.base, pair.new))


@BOTH
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_every_odd_value_becomes_every_other(kernels: Kernels, item_bytes: int) -> None:
    both = np.array(list(product(ODD_BITS[item_bytes], repeat=2)), f"<u{item_bytes}")
    filler = weights(5000, 1, item_bytes)  # so that the sparse form pays
    pair = Pair(
        np.concatenate([np.ascontiguousarray(both[:, 0]), filler]),
        np.concatenate([np.ascontiguousarray(both[:, 1]), filler]),
    )
    payload = encode(pair, kernels)
    assert payload.kind is Kind.SPARSE
    assert np.array_equal(applied(payload, pair, kernels), pair.new)


@BOTH
def test_all_bf16_patterns_change_by_any_difference(kernels: Kernels) -> None:
    """The map and the difference modulo 2^16 are bijections, so nothing is special."""
    base = np.arange(1 << 16, dtype=np.uint16)
    for difference in (1, 2, 3, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF):
        new = base + np.uint16(difference)
        changes, values = kernels.find(base, new)
        assert np.array_equal(values, new[base != new])
        assert changes.num_changed == len(base)
        target = base.copy()
        codes = numpy_kernels.unpack_2bit(changes.codes, changes.num_changed)
        zigzags = kernels.decode_zigzags(codes, changes.large_codes)
        kernels.apply(target, np.arange(len(base)), zigzags)
        assert np.array_equal(target, new)


@BOTH
def test_an_ulp_is_a_small_difference_on_either_side_of_zero(kernels: Kernels) -> None:
    base = np.array([0x3F80, 0xBF80, 0x0000, 0x8000, 0x0001], np.uint16)
    new = np.array([0x3F81, 0xBF81, 0x8000, 0x0000, 0x0000], np.uint16)  # 1, −1, 0, −0, denormal
    codes = numpy_kernels.unpack_2bit(kernels.find(base, new)[0].codes, len(new))
    assert codes.tolist() == [1, 0, 0, 1, 0]


@BOTH
@pytest.mark.parametrize(
    "gap", [0, 1, 254, 255, 256, 509, 510, 65534, 65535, 65536, 70_000, 600_000]
)
def test_gaps_of_every_length(kernels: Kernels, gap: int) -> None:
    base = np.zeros(2 * gap + 2_000_003, np.uint16)
    new = base.copy()
    new[[gap, 2 * gap + 1]] = 1
    pair = Pair(base, new)
    payload = encode(pair, kernels)
    assert payload.kind is Kind.SPARSE and payload.num_changed == 2
    assert np.array_equal(applied(payload, pair, kernels), new)


@BOTH
def test_a_gap_beyond_32_bits(kernels: Kernels) -> None:
    """No such tensor is allocated: the gap spans chunks."""
    chunk, _ = NUMPY.find(np.zeros(3, np.uint16), np.array([0, 1, 1], np.uint16))
    gap = 5 << 32
    far_away = Changes(
        num_elements=gap, num_changed=0, lead=gap, trail=0, gaps=chunk.gaps[:0],
        long_gaps=chunk.long_gaps, codes=chunk.codes[:0], large_codes=chunk.large_codes,
    )  # fmt: skip
    gaps, long_gaps = join_gaps([chunk, far_away, chunk])
    planes = numpy_kernels.to_planes(np.concatenate(long_gaps))
    places = sparse.ChangedPositions(
        gaps=np.concatenate(gaps), long_gaps=tuple(planes), low_bits=()
    )
    (positions,) = places.steps(kernels)
    assert positions.tolist() == [1, 2, gap + 4, gap + 5]
    assert places.end() == gap + 6


@BOTH
@pytest.mark.parametrize("density", [0.2, 0.009, 0.003])  # short gaps, long ones, with low bits
def test_chunks_and_steps_have_no_seams(
    kernels: Kernels, density: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = trained(60_001, density, seed=5)
    whole = encode(pair, kernels)
    assert (Role.LONG_GAPS in roles(whole)) == (density < 0.1)
    monkeypatch.setattr(type(kernels), "chunk_bytes", 64)
    monkeypatch.setattr(sparse, "STEP", 4)
    assert encode(pair, kernels) == whole
    assert np.array_equal(applied(whole, pair, kernels), pair.new)


def test_threads_change_nothing() -> None:
    pair = trained(1_500_000, 0.01, seed=6)
    base, new = raw(pair.base), raw(pair.new)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = diff_tensor(base, new, 2, pool=pool)
    assert encode_one(found, base, new) == encode(pair)


def test_numba_is_used_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    best_kernels.cache_clear()
    assert isinstance(best_kernels(), NumbaKernels)
    best_kernels.cache_clear()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert type(best_kernels()) is Kernels
    best_kernels.cache_clear()


@BOTH
@pytest.mark.parametrize("offset", [1, 2, 3, 6])
def test_tensors_lie_at_any_address(kernels: Kernels, offset: int) -> None:
    pair = trained(3001, 0.1, seed=7)
    base, new, target = bytearray(6100), bytearray(6100), bytearray(6100)
    part = slice(offset, offset + 6002)
    base[part] = target[part] = raw(pair.base)
    new[part] = raw(pair.new)
    payload = encode_tensor(memoryview(base)[part], memoryview(new)[part], 2, kernels=kernels)
    apply_payload(payload, [memoryview(target)[part]], 2, kernels=kernels)
    assert target == new


@BOTH
def test_bits_may_be_read_only(kernels: Kernels) -> None:
    pair = trained(3000, 0.1, seed=8)
    base, new = memoryview(pair.base.tobytes()), memoryview(pair.new.tobytes())
    assert encode_tensor(base, new, 2, kernels=kernels) == encode(pair)


# --- kinds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_the_same_bits_cost_nothing(item_bytes: int) -> None:
    bits = memoryview(bytes(800))
    assert encode_tensor(bits, bits, item_bytes) == encode_tensor(
        bits, memoryview(bytes(800)), item_bytes
    )
    assert encode_tensor(bits, bits, item_bytes).kind is Kind.SAME
    assert encode_tensor(memoryview(b""), memoryview(b""), item_bytes).kind is Kind.SAME


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_without_a_base_of_its_size_a_tensor_is_sent_in_full(item_bytes: int) -> None:
    new = memoryview(np.random.default_rng(1).bytes(808))
    for base in (None, memoryview(b""), memoryview(bytes(800))):
        payload = encode_tensor(base, new, item_bytes)
        assert payload.kind is Kind.FULL and payload.size == 808
        target = bytearray(808)
        apply_payload(payload, [memoryview(target)], item_bytes)
        assert target == new


@pytest.mark.parametrize("item_bytes", [1, 8])
def test_other_item_sizes_are_same_or_full(item_bytes: int) -> None:
    base = memoryview(bytes(8000))
    new = memoryview(bytes(7999) + b"1")
    payload = encode_tensor(base, new, item_bytes)
    assert payload.kind is Kind.FULL and payload.size < 60


def test_values_are_sent_where_differences_cost_more() -> None:
    random = np.random.default_rng(2)
    base = random.integers(0, 1 << 16, 100_000, np.uint16)
    new = base.copy()
    new[random.random(100_000) < 0.05] = 0x3F80
    pair = Pair(base, new)
    payload = encode(pair, NUMPY)
    assert Role.VALUES in roles(payload) and Role.CODES not in roles(payload)
    assert payload == encode(pair, COMPILED)
    assert np.array_equal(applied(payload, pair), new)


def test_a_packed_stream_is_shorter_than_a_plain_one_or_not_packed() -> None:
    for num_bytes in range(64):
        data = np.zeros(num_bytes, np.uint8)
        for stream in (
            pack(Role.GAPS, data),
            pack_pieces(Role.GAPS, num_bytes, [data[:9], data[9:]]),
        ):
            assert len(stream.data) < num_bytes or stream.data == data.data
            assert np.array_equal(unpack(stream), data)


# --- size ----------------------------------------------------------------------------------------


@given(
    num_elements=st.integers(0, 30_000),
    density=st.floats(0, 1),
    item_bytes=st.sampled_from([2, 4]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None)
def test_never_larger_than_the_tensor(
    num_elements: int, density: float, item_bytes: int, seed: int
) -> None:
    pair = trained(num_elements, density, seed, item_bytes)
    assert encode(pair).size <= pair.new.nbytes


def test_dense_small_steps_beat_the_full_tensor() -> None:
    pair = trained(200_000, 1.0, seed=3)
    payload = encode(pair)
    assert payload.kind is Kind.SPARSE
    assert payload.size < pair.new.nbytes / 5
    assert np.array_equal(applied(payload, pair), pair.new)


@pytest.mark.parametrize("density", [0.0044, 0.01, 0.02, 0.1])
def test_close_to_the_entropy(density: float) -> None:
    pair = trained(8_000_000, density, seed=4)
    places = np.flatnonzero(pair.base != pair.new)
    bound = entropy_bytes(np.diff(places, prepend=-1)) + entropy_bytes(
        pair.new[places] - pair.base[places]
    )
    assert encode(pair).size <= 1.03 * bound


def entropy_bytes(numpy_kernels: np.ndarray[tuple[int], np.dtype[np.int64]]) -> float:
    """Entropy of the symbols, with their own histogram as the model."""
    counts = np.unique(numpy_kernels, return_counts=True)[1]
    return float(-(counts * np.log2(counts / counts.sum())).sum() / 8)


SCRATCH_BYTES = 36 << 20
"""Memory of two threads and of the chunks that they are ahead, at most five; independent of the
tensor size, and less than a tensor."""


def overwritten(num_elements: int, density: float, item_bytes: int) -> Pair:
    """Random changes, which pack badly: the worst case for memory."""
    pair = trained(num_elements, density, 9, item_bytes)
    any_bits = np.random.default_rng(1).integers(
        0, 1 << 8 * item_bytes, num_elements, pair.new.dtype
    )
    return Pair(pair.base, np.where(pair.base != pair.new, any_bits, pair.base))


HEAVY: dict[str, Callable[[], Pair]] = {
    "few": lambda: trained(24_000_000, 0.01, seed=9),
    "all by a step": lambda: trained(24_000_000, 1.0, seed=9),
    "values": lambda: overwritten(24_000_000, 0.24, 2),
    "large differences": lambda: overwritten(12_000_000, 0.7, 4),
    "all": lambda: overwritten(24_000_000, 1.0, 2),
}


@pytest.mark.parametrize(
    ("kernels", "name"), [*((COMPILED, name) for name in HEAVY), (NUMPY, "few"), (NUMPY, "values")]
)
def test_at_most_one_extra_tensor_is_in_memory(
    kernels: Kernels, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two large tensors in a row: the changes of one are freed before the next."""
    pair = HEAVY[name]()
    monkeypatch.setattr(codec, "_kernels_for", partial(always, kernels))
    encode(trained(100, 0.5, 9, pair.item_bytes), kernels)  # compiled code stays in memory
    written = 0

    class Out:
        def write(self, data: bytes | memoryview) -> None:
            nonlocal written
            written += len(data)

    tensors = [(str(n), pair.item_bytes, raw(pair.base), raw(pair.new)) for n in range(2)]
    tracemalloc.start()
    write_delta(Out(), "a" * 64, "b" * 64, tensors)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < 2.01 * pair.new.nbytes
    assert peak < pair.new.nbytes + SCRATCH_BYTES


@pytest.mark.parametrize("name", HEAVY)
def test_applying_takes_less_than_a_tensor(name: str) -> None:
    pair = HEAVY[name]()
    payload, target = encode(pair), pair.base
    tracemalloc.start()
    apply_payload(payload, [raw(target)], target.itemsize)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(target, pair.new)
    assert peak < target.nbytes + (1 << 20)


# --- sharing -------------------------------------------------------------------------------------


@BOTH
def test_tensors_share_a_payload(kernels: Kernels) -> None:
    some = [trained(size, density, seed=size) for size, density in SHARING]
    found = [diff_tensor(raw(pair.base), raw(pair.new), 2, kernels=kernels) for pair in some]
    payload = encode_diffs([one for one in found if one is not None])
    assert payload is not None and payload.kind is Kind.SPARSE
    targets = [pair.base.copy() for pair in some]
    apply_payload(payload, [raw(target) for target in targets], 2, kernels=kernels)
    for target, pair in zip(targets, some, strict=True):
        assert np.array_equal(target, pair.new)


SHARING = [
    (0, 0.0),
    (9, 0.0),
    (50_000, 0.01),
    (1, 0.0),
    (70_000, 0.0),
    (0, 0.0),
    (40_000, 0.05),
    (5, 0.0),
]


def test_sharing_costs_less_than_apart() -> None:
    some = [trained(20_000, 0.01, seed) for seed in range(30)]
    found = [diff_tensor(raw(pair.base), raw(pair.new), 2) for pair in some]
    shared = encode_diffs([one for one in found if one is not None])
    assert shared is not None
    assert shared.size < 0.95 * sum(encode(pair).size for pair in some)


def test_only_rarely_changed_tensors_may_share() -> None:
    for density, is_rare in ((0.0, True), (0.01, True), (0.5, False)):
        pair = trained(20_000, density, seed=1)
        found = diff_tensor(raw(pair.base), raw(pair.new), 2)
        assert found is not None and found.is_rare is is_rare
    other = weights(20_000, seed=99)
    assert diff_tensor(raw(weights(20_000, seed=1)), raw(other), 2) is None


def test_nothing_changed_in_a_chunk() -> None:
    assert unchanged(np.zeros(7, np.uint16)).lead == 7
