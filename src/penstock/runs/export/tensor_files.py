# SPDX-License-Identifier: Apache-2.0
"""Tensors of safetensors files as float32 arrays, one at a time; needs no torch.

numpy has no bfloat16, so the library does not read it into arrays; here its bits become the upper
half of a float32, which is exact. Owns only that: other types than floats are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from penstock.errors import WeightsError

Array = npt.NDArray[np.float32]
Precision = Literal["f32", "bf16"]
"""Of a written file."""
_STORED: dict[str, type[Any]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in its file."""

    name: str
    shape: tuple[int, ...]
    path: Path
    dtype: str
    start: int
    """First byte in the file."""

    def read(self) -> Array:
        kind = np.dtype(_STORED[self.dtype])
        count = int(np.prod(self.shape, dtype=np.int64))
        found = np.fromfile(self.path, dtype=kind, count=count, offset=self.start)
        if self.dtype == "BF16":
            found = (found.astype(np.uint32) << 16).view(np.float32)
        return found.astype(np.float32, copy=False).reshape(self.shape)


def tensors_of(path: Path) -> Iterator[StoredTensor]:
    """The tensors of one file, in its order."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in _STORED:
            raise WeightsError(
                f"{path}: tensor {name} is {entry['dtype']}, and an export takes "
                f"{', '.join(_STORED)}; export the model as it is, without --merge or gguf"
            )
        yield StoredTensor(
            name=name,
            shape=tuple(entry["shape"]),
            path=path,
            dtype=entry["dtype"],
            start=8 + length + entry["data_offsets"][0],
        )
