# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders made by hand, so that these tests need neither torch nor safetensors."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

TENSORS: dict[str, tuple[int, ...]] = {
    "model.embed.weight": (11, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (11, 8),
    "model.scale": (),
}


def safetensors_bytes(header: dict[str, object] | bytes, data: bytes) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


def weights_bytes(shapes: dict[str, tuple[int, ...]], seed: int) -> bytes:
    """A float32 safetensors file with these tensors."""
    draw = random.Random(seed)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in shapes.items():
        num_items = 1
        for size in shape:
            num_items *= size
        start = len(data)
        data += draw.randbytes(4 * num_items)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, len(data)]}
    return safetensors_bytes(header, data)


def write_folder(folder: Path, seed: int = 0) -> Path:
    """A two-shard snapshot; only the second shard changes with `seed`."""
    folder.mkdir(parents=True, exist_ok=True)
    first = dict(list(TENSORS.items())[:1])
    rest = dict(list(TENSORS.items())[1:])
    (folder / "model-00001-of-00002.safetensors").write_bytes(weights_bytes(first, 7))
    (folder / "model-00002-of-00002.safetensors").write_bytes(weights_bytes(rest, seed))
    (folder / "config.json").write_text('{"model_type": "qwen3"}\n')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}\n' * 50)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
