# SPDX-License-Identifier: Apache-2.0
"""Run folders with published versions of tiny models, made without training."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tests.unit.runs.test_fork import write_ledger

from penstock.config import LoraConfig, demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.trainer.model_folders import init_model
from penstock.types import PolicyName
from penstock.weights.lora import PLAIN_LORA_CONFIG, A, B
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from penstock.weights.publish import StoredVersion, put_snapshot

POLICY = PolicyName("policy")
RANK, ALPHA = 4, 6
ADAPTED = tuple(
    f"model.layers.{layer}.{name}"
    for layer in (0, 1)
    for name in ("self_attn.q_proj", "mlp.down_proj")
)
NUM_VERSIONS = 3


def tiny_model(folder: Path, seed: int = 0) -> Path:
    """The built-in model with larger weights, so that its answers depend on all of them."""
    init_model("builtin:tiny-qwen3", folder, seed)
    path = folder / "model.safetensors"
    weights = load_file(path)
    save_file(
        {name: w * (8 if w.ndim > 1 else 1) for name, w in weights.items()},
        path,
        metadata={"format": "pt"},
    )
    return folder


def store_run(
    folder: Path, model: Path, change: Callable[[Path, int], None], **settings: Any
) -> RunFolder:
    """A run with versions 0 to 2; `change` edits the model before each is published."""
    found = RunFolder(folder)
    config = demo_config(0)
    policy = config.models[POLICY].model_copy(update={"init": str(model), **settings})
    found.write_config(config.model_copy(update={"models": {POLICY: policy}, "name": folder.name}))
    found.allocate_endpoints(folder.parent, ())
    versions: list[StoredVersion] = []
    for number in range(NUM_VERSIONS):
        change(model, number)
        versions.append(put_snapshot(found.weights, model, policy=POLICY, number=number))
    write_ledger(found.path / "ledger", versions)
    return found


def full_run(folder: Path) -> RunFolder:
    """All weights are trained."""
    model = tiny_model(folder.parent / f"{folder.name}-model")

    def change(model: Path, number: int) -> None:
        weights = load_file(model / "model.safetensors")
        draw = np.random.default_rng(number)
        weights["lm_head.weight"] = draw.standard_normal(
            weights["lm_head.weight"].shape, dtype=np.float32
        )
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    return store_run(folder, model, change)


def lora_run(folder: Path) -> RunFolder:
    """Only an adapter is trained."""
    model = tiny_model(folder.parent / f"{folder.name}-model")
    settings = PLAIN_LORA_CONFIG | {"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"}
    settings["target_modules"] = ["q_proj", "down_proj"]
    (model / ADAPTER_CONFIG).write_text(json.dumps(settings))
    shapes = {
        name: load_file(model / "model.safetensors")[f"{name}.weight"].shape for name in ADAPTED
    }

    def change(model: Path, number: int) -> None:
        draw = np.random.default_rng(number)
        tensors: dict[str, Any] = {}
        for name, (rows, columns) in shapes.items():
            for part, shape in ((A, (RANK, columns)), (B, (rows, RANK))):
                tensors[f"{ADAPTER_PREFIX}{name}{part}"] = draw.standard_normal(
                    shape, dtype=np.float32
                )
        save_file(tensors, model / ADAPTER_WEIGHTS, metadata={"format": "pt"})

    lora = LoraConfig(rank=RANK, alpha=ALPHA, targets=("q_proj", "down_proj"))
    return store_run(folder, model, change, lora=lora)
