# SPDX-License-Identifier: Apache-2.0
"""Plain LoRA adapters in PEFT format: tensor names and config. Trainers write them and engines read
them; other adapter types are not supported."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.types import JsonObject

A, B = ".lora_A.weight", ".lora_B.weight"
"""Name suffixes of a layer's two factors."""
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
    """The first setting that is not plain LoRA; missing or empty settings are fine."""
    for setting, plain in PLAIN_LORA_CONFIG.items():
        if (config.get(setting) or plain) != plain:
            return f"{setting} is {config[setting]!r}; plain LoRA needs {plain!r}"
    return None
