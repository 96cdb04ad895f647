# SPDX-License-Identifier: Apache-2.0
"""Writes versions of a policy that trains an adapter (the base's files and PEFT's two), and merges
them in float64."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 6
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def write_version(
    base: Path,
    folder: Path,
    *,
    seed: int,
    rank: int = RANK,
    alpha: float = ALPHA,
    targets: Sequence[str] = TARGETS,
    spread: float = 0.2,
) -> Path:
    """Random A and B with this spread; 0 makes B zero, as at the start of training. The base's
    files are hard links, as in a node's cache."""
    folder.mkdir(parents=True)
    for path in base.iterdir():
        os.link(path, folder / path.name)
    draw = np.random.Generator(np.random.PCG64(seed))
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, weight in load_file(base / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            num_out, num_in = weight.shape
            a = draw.normal(0.0, 0.2, (rank, num_in)).astype(np.float32)
            b = draw.normal(0.0, 1.0, (num_out, rank)).astype(np.float32) * np.float32(spread)
            tensors[f"base_model.model.{module}.lora_A.weight"] = a
            tensors[f"base_model.model.{module}.lora_B.weight"] = b
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "base_model_name_or_path": None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": list(targets),
        "task_type": "CAUSAL_LM",
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2))
    return folder


def merged(folder: Path) -> Any:
    """W + alpha / r · B A as one full model, computed in float64 without penstock's code."""
    config = json.loads((folder / CONFIG).read_text())
    scale = config["lora_alpha"] / config["r"]
    adapter = {
        name.removeprefix("base_model.model."): tensor.astype(np.float64)
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    state: dict[str, torch.Tensor] = {}
    num_changed = 0
    for name, weight in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        whole = weight.astype(np.float64)
        if f"{module}.lora_A.weight" in adapter:
            whole += scale * adapter[f"{module}.lora_B.weight"] @ adapter[f"{module}.lora_A.weight"]
            num_changed += 1
        state[name] = torch.from_numpy(whole)
    assert 2 * num_changed == len(adapter)
    shape = AutoConfig.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_config(
        shape, dtype=torch.float64, attn_implementation="eager"
    )
    missing, unknown = model.load_state_dict(state, strict=False)
    assert not unknown and set(missing) <= {"lm_head.weight"}, "a tied head has no tensor"
    model.tie_weights()
    return model.eval().double()


def logprobs_under(model: Any, prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
    """Log-probs of the sampled tokens at temperature 1."""
    ids = torch.tensor([[*prompt, *sampled]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(sampled)), list(sampled)].tolist()
