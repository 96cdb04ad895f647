# SPDX-License-Identifier: Apache-2.0
"""Adds a LoRA adapter into the weights of its model, which is then an ordinary model.

W becomes W + alpha / rank · B A. The result is float32 whatever the model was stored in: engines
add the adapter in float32 too, and rounding to fewer bits can swallow what was learned.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.errors import EngineError, WeightsError
from penstock.gateway.tokenizer_files import read_object
from penstock.rollout.adapter_info import read_adapter_info
from penstock.runs.export.tensor_files import Array, tensors_of
from penstock.weights.lora import A, B
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS

INDEX = "model.safetensors.index.json"


def merge_adapter(folder: Path) -> None:
    """Replace the model and the adapter in this folder by the merged model. Raises WeightsError
    before anything is computed: factors of a few bytes can have a product of terabytes."""
    save: Any = import_module("safetensors.numpy").save_file
    settings = read_object(folder / ADAPTER_CONFIG)
    factors = {one.name: one for one in tensors_of(folder / ADAPTER_WEIGHTS)}
    shapes = {name: one.shape for name, one in factors.items()}
    base = {one.name: one.shape for path in model_files(folder) for one in tensors_of(path)}
    try:
        adapter = read_adapter_info(settings, shapes, base, folder / ADAPTER_CONFIG)
    except EngineError as error:
        raise WeightsError(f"{error}. `penstock weights verify RUN` looks for damage") from None
    num_bytes = 0
    for path in model_files(folder):
        merged: dict[str, Array] = {}
        for tensor in tensors_of(path):
            layer = tensor.name.removesuffix(".weight")
            merged[tensor.name] = tensor.read()
            if layer in adapter.modules:
                a, b = (factors[f"{ADAPTER_PREFIX}{layer}{part}"].read() for part in (A, B))
                merged[tensor.name] += adapter.scale * (b @ a)
        num_bytes += sum(weight.nbytes for weight in merged.values())
        save(merged, path.with_suffix(".merged"), metadata={"format": "pt"})
        path.with_suffix(".merged").replace(path)
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        (folder / name).unlink()
    _describe(folder, num_bytes)


def model_files(folder: Path) -> list[Path]:
    """The files with the model's own tensors."""
    return sorted(path for path in folder.glob("*.safetensors") if path.name != ADAPTER_WEIGHTS)


def _describe(folder: Path, num_bytes: int) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text())
        index["metadata"] = {**index.get("metadata", {}), "total_size": num_bytes}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
