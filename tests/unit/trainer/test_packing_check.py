# SPDX-License-Identifier: Apache-2.0
"""Which architectures may be trained packed: tiny ones with weights drawn at random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from penstock.errors import ConfigError
from penstock.trainer.packing_check import require_packable

SMALL = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def make_tiny(name: str, more: dict[str, Any]) -> PreTrainedModel:
    torch.manual_seed(0)
    kind: Any = CONFIG_MAPPING[name]
    maker: Any = AutoModelForCausalLM
    config = kind(**{**SMALL, **more})
    model = maker.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # away from a flat distribution
    return model


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "smollm3", "olmo2"])
def test_plain_attention_may_be_packed(name: str) -> None:
    require_packable(make_tiny(name, {}))


@pytest.mark.parametrize("window", [1, 3, 4, 5, 11, 12, 13])
def test_windows_of_attention_may_be_packed(window: int) -> None:
    """Shorter than the samples of the trial, as long as one, and longer."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    require_packable(make_tiny("mistral", {"sliding_window": window}))
    require_packable(make_tiny("gemma3_text", {"sliding_window": window, **kinds}))


LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize(
    ("name", "rope"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0}),
        ("phi3", {"rope_type": "longrope", "original_max_position_embeddings": 32, **LONGROPE}),
    ],
)
def test_positions_encoded_by_the_longest_sample_beside_are_refused(
    name: str, rope: dict[str, Any]
) -> None:
    model = make_tiny(name, {"rope_parameters": {"rope_theta": 1e4, **rope}})
    with pytest.raises(ConfigError, match=f"packed: its positions .* the {rope['rope_type']} rule"):
        require_packable(model)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        pytest.param("granite", {"logits_scaling": 8.0}, id="scaled logits"),
        pytest.param(
            "lfm2", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}, id="convolution"
        ),
        pytest.param("nemotron", {}, id="another call of attention"),
        pytest.param(
            "qwen3_next",
            {**LINEAR, "num_experts": 0, "mlp_only_layers": [0, 1]},
            id="linear attention",
        ),
    ],
)
def test_what_would_be_trained_on_other_log_probs_is_refused(
    name: str, more: dict[str, Any]
) -> None:
    model = make_tiny(name, more)
    with pytest.raises(ConfigError, match=f"{type(model).__name__} cannot be trained packed"):
        require_packable(model)


def test_attention_with_bent_scores_is_refused_however_little_it_shows() -> None:
    model = make_tiny("gemma2", {"query_pre_attn_scalar": 8, "final_logit_softcapping": None})
    with pytest.raises(ConfigError, match="Gemma2Attention needs attention with softcap"):
        require_packable(model)
