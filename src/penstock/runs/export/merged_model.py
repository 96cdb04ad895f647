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

from penstock.errors import WeightsError
from penstock.runs.export.tensor_files import Array, tensors_of
from penstock.weights.lora import A, B, unsupported_setting
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS

INDEX = "model.safetensors.index.json"


def merge_adapter(folder: Path) -> None:
    """Replace the model and the adapter in this folder by the merged model."""
    save: Any = import_module("safetensors.numpy").save_file
    settings: dict[str, Any] = json.loads((folder / ADAPTER_CONFIG).read_text())
    if why := unsupported_setting(settings):
        raise WeightsError(f"{folder / ADAPTER_CONFIG} cannot be merged: {why}")
    scale = settings["lora_alpha"] / settings["r"]
    factors = {one.name: one for one in tensors_of(folder / ADAPTER_WEIGHTS)}
    layers = {
        name.removeprefix(ADAPTER_PREFIX).removesuffix(A) for name in factors if name.endswith(A)
    }
    num_bytes = 0
    for path in model_files(folder):
        merged: dict[str, Array] = {}
        for tensor in tensors_of(path):
            layer = tensor.name.removesuffix(".weight")
            merged[tensor.name] = tensor.read()
            if layer in layers:
                layers.discard(layer)
                a, b = (factors[f"{ADAPTER_PREFIX}{layer}{part}"].read() for part in (A, B))
                merged[tensor.name] += scale * (b @ a)
        num_bytes += sum(weight.nbytes for weight in merged.values())
        save(merged, path.with_suffix(".merged"), metadata={"format": "pt"})
        path.with_suffix(".merged").replace(path)
    if layers:
        raise WeightsError(
            f"{folder}: the model has no layer {sorted(layers)[0]}, which its adapter changes; "
            "`penstock weights verify RUN` looks for damage"
        )
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
