# SPDX-License-Identifier: Apache-2.0
"""A plain LoRA adapter in the form that PEFT writes: what its tensors are called, and what its
config says. Trainers write it and engines read it; neither knows another kind."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.types import JsonObject

A, B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of a layer's two factors."""
PLAIN_LORA_CONFIG: JsonObject = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "fan_in_fan_out": False,
    "lora_bias": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
}


def unsupported_setting(config: Mapping[str, object]) -> str | None:
    """Where this config is not plain LoRA's; a word left out or empty is as good."""
    for word, plain in PLAIN_LORA_CONFIG.items():
        if (config.get(word) or plain) != plain:
            return f"{word} is {config[word]!r}, and plain LoRA's is {plain!r}"
    return None
