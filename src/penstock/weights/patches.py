# SPDX-License-Identifier: Apache-2.0
"""Patches: what changed between two staged versions, for an engine that has loaded the first.

A patch is a safetensors file next to the folder of the second version, named after both. For each
changed tensor it has the positions of the changed elements in the flattened tensor and their new
values; a tensor that changed completely has only values. Its metadata has dtype and digest of every
tensor of the second version, so that an engine can prove afterwards what it has loaded.

Positions come from deltas, values from the verified file. Owns the format, the choice between a
patch and the full files, and which tensors are verified after a patch. Knows no engines.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from penstock.durable import open_regular
from penstock.errors import WeightsError
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.deltas.file_delta import changed_by, layout_of
from penstock.weights.deltas.numpy_kernels import BITS, Positions
from penstock.weights.manifest import file_digest
from penstock.weights.tensors import ITEM_BYTES, Layout, TensorEntry, TensorRange, make_layout

POSITIONS = "positions:"
"""Prefix of a tensor's positions in a patch."""
VALUES = "values:"
"""Prefix of a tensor's values in a patch."""
DIGESTS = "digests"
"""Metadata key: dtype and digest of each tensor, by name, as JSON."""
MAX_SHARE = 0.25
"""Largest patch, as a share of the files that it replaces. Writing scattered elements costs several
times as much per byte as copying."""
FULL_CHECK_EVERY = 25
"""After so many patches in a row all tensors are verified, as often as a store keeps an anchor."""
_MAX_I32 = 1 << 31

_digest_decoder = msgspec.json.Decoder(dict[str, tuple[str, str]])

Changed = Mapping[str, Positions | None]
"""Positions of the changed elements of each changed tensor; None for all elements."""
Shapes = dict[str, tuple[str, tuple[int, ...]]]
"""Dtype and shape of each tensor of a patch, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedFile:
    path: Path
    """The verified file of the second version."""
    deltas: Sequence[tuple[DeltaEntry, Path]]
    """Lead to it from the file of the first version."""


def patch_path(base: Path, folder: Path) -> Path:
    """The patch that leads from one staged version to another."""
    return folder.parent / f"{folder.name}.from.{base.name}.safetensors"


def target_of(patch: Path) -> str:
    """Name of the folder that a patch leads to."""
    return patch.name.partition(".from.")[0]


def find_patch(base: Path | None, folder: Path) -> Path | None:
    """The patch from the loaded version, if there is one."""
    path = None if base is None else patch_path(base, folder)
    return path if path is not None and path.is_file() else None


def tensors_to_verify(names: Iterable[str], num_patches: int) -> list[str]:
    """Tensors to compare with their digests after the `num_patches`-th patch in a row: another
    share each time, and after FULL_CHECK_EVERY patches all of them."""
    turn = num_patches % FULL_CHECK_EVERY
    return [name for at, name in enumerate(sorted(names)) if turn in (0, at % FULL_CHECK_EVERY)]


def write_patch(
    path: Path, tensors: Iterable[TensorEntry], files: Sequence[ChangedFile]
) -> int | None:
    """Write the patch to the version with these tensors; returns its size in bytes, or None if it
    would not be small enough to be worth it. Raises WeightsError if a delta is damaged."""
    layouts = [layout_of(file.path) for file in files]
    room = int(MAX_SHARE * sum(layout.num_bytes for layout in layouts))
    found: list[tuple[ChangedFile, Layout, Changed]] = []
    shapes: Shapes = {}
    for file, layout in zip(files, layouts, strict=True):
        if (changed := _changed(file, layout, room)) is None:
            return None
        of_file = _shapes(layout, changed)
        room -= _num_bytes(of_file)
        found.append((file, layout, changed))
        shapes |= of_file
    digests = {tensor.name: (tensor.dtype, tensor.digest) for tensor in tensors}
    made = make_layout(shapes, {DIGESTS: msgspec.json.encode(digests).decode()})
    hidden = path.with_name(f".{secrets.token_hex(8)}")
    try:
        with hidden.open("xb") as out:
            out.write(made.head)
            for name, content in _contents(found):
                out.seek(made.byte_ranges[name].start)
                out.write(content)
        hidden.rename(path)
    finally:
        hidden.unlink(missing_ok=True)
    return made.num_bytes


def _changed(file: ChangedFile, layout: Layout, room: int) -> Changed | None:
    """None as soon as a patch of it would take more than `room` bytes: deltas of a few hundred
    bytes may change all elements of a file, and change them back."""
    changed: Changed = {}
    for step, path in file.deltas:
        if file_digest(path) != step.blob:
            raise WeightsError(f"delta {path} does not match its digest; it is fetched again")
        with open_regular(path) as delta:
            by_step = changed_by(delta, layout, base_blob=step.base, max_bytes=room)
        if by_step is None:
            return None
        changed = _union(changed, by_step)
        if _num_bytes(_shapes(layout, changed)) > room:
            return None
    return changed


def _union(first: Changed, second: Changed) -> Changed:
    """Elements that either of two steps changes."""
    both = {name: _merge(first[name], second[name]) for name in first.keys() & second.keys()}
    return {**first, **second, **both}


def _merge(first: Positions | None, second: Positions | None) -> Positions | None:
    return None if first is None or second is None else np.union1d(first, second)


def _shapes(layout: Layout, changed: Changed) -> Shapes:
    shapes: Shapes = {}
    for name, positions in changed.items():
        tensor = layout.byte_ranges[name]
        if positions is None:
            shapes[VALUES + name] = (tensor.dtype, tensor.shape)
        else:
            shapes[POSITIONS + name] = (_position_dtype(tensor), (len(positions),))
            shapes[VALUES + name] = (tensor.dtype, (len(positions),))
    return shapes


def _num_bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for dtype, shape in shapes.values())


def _position_dtype(tensor: TensorRange) -> str:
    return "I32" if (tensor.end - tensor.start) // ITEM_BYTES[tensor.dtype] <= _MAX_I32 else "I64"


def _contents(
    found: Iterable[tuple[ChangedFile, Layout, Changed]],
) -> Iterator[tuple[str, bytes]]:
    for file, layout, changed in found:
        raw = np.memmap(file.path, np.uint8, mode="r")
        for name, positions in changed.items():
            tensor = layout.byte_ranges[name]
            content = raw[tensor.start : tensor.end]
            if positions is not None:
                dtype = {"I32": "<i4", "I64": "<i8"}[_position_dtype(tensor)]
                yield POSITIONS + name, positions.astype(dtype).tobytes()
                content = content.view(BITS[ITEM_BYTES[tensor.dtype]])[positions]
            yield VALUES + name, content.tobytes()


def read_digests(metadata: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Dtype and digest of each tensor, from the metadata of a patch."""
    return _digest_decoder.decode(metadata[DIGESTS])
