# SPDX-License-Identifier: Apache-2.0
"""Random chains of versions: tensors of every dtype and any bits, changed a little, much or not at
all from one version to the next, and now and then added, removed, renamed or resized.

Hypothesis draws what happens, NumPy the bits. Knows nothing of deltas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.unit.weights.snapshot_folders import safetensors_bytes
from tests.unit.weights.tensor_pairs import ODD_BITS

from penstock.weights.tensors import ITEM_BYTES

DTYPES = ["BF16"] * 6 + ["F16"] * 3 + ["F32"] * 4 + sorted(ITEM_BYTES)
SHAPES = st.one_of(
    st.sampled_from([(), (0,), (3, 0, 2), (1,)]),
    st.tuples(st.integers(1, 64)),
    st.tuples(st.integers(1, 50), st.integers(1, 60)),
    st.tuples(st.integers(3000, 9000)),
)
DENSITIES = st.sampled_from([0.0, 0.0, 0.0005, 0.004, 0.01, 0.05, 0.3, 0.8, 1.0])
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
MAX_TENSORS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    bits: NDArray[Any]
    """One-dimensional, unsigned, of the dtype's size."""


File = tuple[Tensor, ...]
Version = Mapping[str, File]
"""By the name of the file."""


def tensors_of(version: Version) -> dict[str, Tensor]:
    return {tensor.name: tensor for file in version.values() for tensor in file}


def write_version(folder: Path, version: Version) -> Path:
    folder.mkdir(parents=True)
    for name, file in version.items():
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for tensor in file:
            offsets = [end, end := end + tensor.bits.nbytes]
            shape = list(tensor.shape)
            header[tensor.name] = {"dtype": tensor.dtype, "shape": shape, "data_offsets": offsets}
        data = b"".join(tensor.bits.tobytes() for tensor in file)
        (folder / name).write_bytes(safetensors_bytes(header, data))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return folder


@st.composite
def chains(draw: st.DrawFn) -> list[Version]:
    """Two to five versions."""
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    names = iter(f"model.layers.{number}.weight" for number in range(1000))
    version: Version = {
        name: tuple(
            _fresh(draw, random, next(names)) for _ in range(draw(st.integers(0, MAX_TENSORS)))
        )
        for name in FILES[: draw(st.integers(1, len(FILES)))]
    }
    version = _tied(draw, version)
    chain = [version]
    for _ in range(draw(st.integers(1, 4))):
        version = _trained(draw, random, version)
        if draw(st.integers(0, 2)) == 0:
            version = _rebuilt(draw, random, version, names)
        chain.append(version)
    return chain


def _fresh(draw: st.DrawFn, random: np.random.Generator, name: str) -> Tensor:
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
    return Tensor(name=name, dtype=dtype, shape=shape, bits=_bits(draw, random, dtype, shape))


def _bits(
    draw: st.DrawFn, random: np.random.Generator, dtype: str, shape: tuple[int, ...]
) -> NDArray[Any]:
    """Weights, any patterns at all, or only odd ones: NaNs with payloads, both zeros, denormals."""
    unsigned = np.dtype(f"<u{ITEM_BYTES[dtype]}")
    num = math.prod(shape)
    match draw(st.sampled_from(["weights", "weights", "any", "odd", "zeros"])):
        case "weights" if unsigned.itemsize == 2:
            drawn = random.standard_normal(num, np.float32) * np.float32(0.02)
            return (drawn.view(np.uint32) >> np.uint32(16)).astype(unsigned)
        case "odd" if unsigned.itemsize in ODD_BITS:
            return random.choice(np.array(ODD_BITS[unsigned.itemsize], unsigned), num)
        case "zeros":
            return np.zeros(num, unsigned)
        case _:
            return np.frombuffer(random.bytes(num * unsigned.itemsize), unsigned)


def _tied(draw: st.DrawFn, version: Version) -> Version:
    """Sometimes the first tensor stands in the last file again, under another name."""
    first = next(iter(tensors_of(version).values()), None)
    if first is None or draw(st.booleans()):
        return version
    last = list(version)[-1]
    return {**version, last: (*version[last], replace(first, name="lm_head.weight"))}


def _trained(draw: st.DrawFn, random: np.random.Generator, version: Version) -> Version:
    """Tensors of equal bits stay equal: they are tied."""
    known: dict[tuple[str, bytes], NDArray[Any]] = {}

    def change(tensor: Tensor) -> Tensor:
        key = (tensor.dtype, tensor.bits.tobytes())
        if key not in known:
            known[key] = _changed(draw, random, tensor.bits)
        return replace(tensor, bits=known[key])

    return {name: tuple(map(change, file)) for name, file in version.items()}


def _changed(draw: st.DrawFn, random: np.random.Generator, bits: NDArray[Any]) -> NDArray[Any]:
    at = random.random(len(bits)) < draw(DENSITIES)
    new = bits.copy()
    match draw(st.sampled_from(["step", "step", "few values", "any"])):
        case "step":
            new[at] += random.choice(np.array([1, 1, 1, 2, 5, 300], np.uint64), at.sum()).astype(
                bits.dtype
            )
            new[at & (random.random(len(bits)) < 0.5)] -= bits.dtype.type(2)
        case "few values" if bits.itemsize in ODD_BITS:
            new[at] = random.choice(np.array(ODD_BITS[bits.itemsize], bits.dtype), at.sum())
        case _:
            new[at] = np.frombuffer(random.bytes(int(at.sum()) * bits.itemsize), bits.dtype)
    return new


def _rebuilt(
    draw: st.DrawFn, random: np.random.Generator, version: Version, names: Iterator[str]
) -> Version:
    """One file with another set of tensors, or with one of another name, shape, dtype or place."""
    here = draw(st.sampled_from(sorted(version)))
    file = list(version[here])
    number = draw(st.integers(0, len(file) - 1)) if file else 0
    match draw(st.sampled_from(["add", "remove", "rename", "resize", "reorder", "split"])):
        case "remove" if file:
            del file[number]
        case "rename" if file:
            file[number] = replace(file[number], name=next(names))
        case "resize" if file:
            file[number] = _fresh(draw, random, file[number].name)
        case "reorder":
            file.reverse()
        case "split" if file:
            return {**version, here: tuple(file[:-1]), "model-more.safetensors": (file[-1],)}
        case _:
            file.append(_fresh(draw, random, next(names)))
    return {**version, here: tuple(file)}
