# SPDX-License-Identifier: Apache-2.0
"""Pairs of tensors as the codec's tests need them: any bits, changed as training changes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.weights.deltas.codec import apply_payload, diff_tensor, encode_one
from penstock.weights.deltas.numba_kernels import NumbaKernels
from penstock.weights.deltas.numpy_kernels import Kernels
from penstock.weights.deltas.payload import Payload

NUMPY: Kernels = Kernels()
COMPILED: Kernels = NumbaKernels()
ODD_BITS = {
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FFF, 0x7C00, 0x3F80],
    4: [0, 1 << 31, 1, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7FFFFFFF, 0x3F800000],
}
"""Zeros of both signs, denormals, infinities, NaNs with payloads, one."""


@dataclass(frozen=True, slots=True)
class Pair:
    base: NDArray[Any]
    new: NDArray[Any]

    @property
    def item_bytes(self) -> int:
        return self.new.itemsize


def raw(array: NDArray[Any]) -> memoryview:
    return array.view(np.uint8).data


def encode_tensor(
    base: memoryview | None, new: memoryview, item_bytes: int, *, kernels: Kernels | None = None
) -> Payload:
    return encode_one(diff_tensor(base, new, item_bytes, kernels=kernels), base, new)


def encode(pair: Pair, kernels: Kernels | None = None) -> Payload:
    return encode_tensor(raw(pair.base), raw(pair.new), pair.item_bytes, kernels=kernels)


def applied(payload: Payload, pair: Pair, kernels: Kernels | None = None) -> NDArray[Any]:
    target = pair.base.copy()
    apply_payload(payload, [raw(target)], pair.item_bytes, kernels=kernels)
    return target


def weights(num_elements: int, seed: int, item_bytes: int = 2) -> NDArray[Any]:
    """Bits of normally distributed weights."""
    draw = np.random.default_rng(seed).standard_normal(num_elements, np.float32)
    bits = (draw * np.float32(0.02)).view(np.uint32)
    return bits if item_bytes == 4 else (bits >> np.uint32(16)).astype(np.uint16)


def trained(num_elements: int, density: float, seed: int, item_bytes: int = 2) -> Pair:
    """Some elements moved by an ulp, few of them by more, as an optimiser does it."""
    random = np.random.default_rng(seed + 1)
    base = weights(num_elements, seed, item_bytes)
    places = np.flatnonzero(random.random(num_elements) < density)
    sizes = random.choice([1, 2, 3, 9], len(places), p=[0.9, 0.07, 0.02, 0.01])
    new = base.copy()
    new[places] += (sizes * random.choice([-1, 1], len(places))).astype(base.dtype)
    return Pair(base, new)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Every item size, density, kind of change and special value, small and rather small."""
    item_bytes = draw(st.sampled_from([2, 4]))
    num_elements = draw(st.one_of(st.integers(0, 40), st.integers(0, 70_000)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = np.dtype(f"<u{item_bytes}")
    base = random.integers(0, 1 << 8 * item_bytes, num_elements, bits)
    if draw(st.booleans()):
        base = random.choice(np.array(ODD_BITS[item_bytes], bits), num_elements)
    density = draw(st.sampled_from([0.0, 0.0003, 0.004, 0.01, 0.1, 0.5, 1.0]))
    changed = random.random(num_elements) < density
    new = base.copy()
    most = 1 << draw(st.integers(1, 8 * item_bytes))
    new[changed] += random.integers(0, most, num_elements, np.uint64).astype(bits)[changed]
    if draw(st.booleans()):
        special = random.choice(np.array(ODD_BITS[item_bytes], bits), num_elements)
        new[changed] = special[changed]
    return Pair(base, new)
