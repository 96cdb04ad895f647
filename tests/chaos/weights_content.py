# SPDX-License-Identifier: Apache-2.0
"""Weights that are a pure function of their number: whoever checks what a node serves needs neither
the store nor the trainer."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from blake3 import blake3

EVERY = 97
"""Each step changes one element in so many."""
RENAMED_EVERY = 13
SIZES = {"embed.weight": 20_000, "layer.weight": 12_000}
HEAD_SIZE = 3000
WEIGHTS = "model.safetensors"


def tensors(number: int) -> dict[str, bytes]:
    """Once in a while a parameter has another name, as after a change of the model's code."""
    sizes = {**SIZES, f"head.{number // RENAMED_EVERY}.weight": HEAD_SIZE}
    return {name: _values(size, number) for name, size in sizes.items()}


def _values(size: int, number: int) -> bytes:
    places = np.arange(size, dtype=np.int64)
    changed_at = number - (number - places) % EVERY
    return ((places * 2_654_435_761 + changed_at * 40_503) & 0xFFFF).astype("<u2").tobytes()


def value_of(found: Mapping[str, bytes]) -> str:
    """What a node computes from the weights it serves: another one for any other bit."""
    digest = blake3()
    for name, data in sorted(found.items()):
        digest.update(name.encode())
        digest.update(data)
    return digest.hexdigest()


def write_folder(folder: Path, number: int) -> None:
    """A new file each time: whoever reads the old one goes on reading it."""
    header: dict[str, object] = {}
    data = b""
    for name, raw in tensors(number).items():
        span = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": "BF16", "shape": [len(raw) // 2], "data_offsets": span}
        data += raw
    encoded = json.dumps(header).encode()
    temporary = folder / f".{WEIGHTS}"
    temporary.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    temporary.replace(folder / WEIGHTS)
    (folder / "config.json").write_text('{"model_type": "qwen3"}')


def read_folder(folder: Path) -> dict[str, bytes]:
    """As an engine does: tensor by tensor."""
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header: dict[str, dict[str, list[int]]] = json.loads(raw[8 : 8 + length])
    return {
        name: raw[8 + length + start : 8 + length + end]
        for name, (start, end) in ((n, found["data_offsets"]) for n, found in header.items())
    }
