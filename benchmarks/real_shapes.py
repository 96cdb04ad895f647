# SPDX-License-Identifier: Apache-2.0
"""Models of real size without their weights: the figures of three public config.json files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model by the figures of its config.json."""

    name: str
    num_layers: int
    sizes: Mapping[str, int]
    vocab_size: int = 151936
    family: str = "qwen3"

    def config(self, num_layers: int) -> dict[str, Any]:
        """As in config.json, with this many layers."""
        return {
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "tie_word_embeddings": False,
            "num_hidden_layers": num_layers,
            **self.sizes,
        }


QWEN3_8B = Shape(
    name="8b",
    num_layers=36,
    sizes={
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
)
QWEN3_32B = Shape(
    name="32b",
    num_layers=64,
    sizes={
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
)
QWEN3_30B_A3B = Shape(
    name="moe",
    family="qwen3_moe",
    num_layers=48,
    sizes={
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
)


def meta_model(shape: Shape, num_layers: int) -> PreTrainedModel:
    """With shapes and no content, so of any size."""
    configs: Any = AutoConfig
    maker: Any = AutoModelForCausalLM
    config = configs.for_model(**shape.config(num_layers))
    with torch.device("meta"):
        return maker.from_config(config, dtype=torch.float32)
