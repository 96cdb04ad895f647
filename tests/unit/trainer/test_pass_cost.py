# SPDX-License-Identifier: Apache-2.0
"""The cost of a row is what torch counts, and ranks divide rows by the cost of their own model."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from benchmarks.real_shapes import QWEN3_8B, QWEN3_30B_A3B
from torch.utils.flop_counter import FlopCounterMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from penstock.trainer.pass_cost import TYPICAL, PassCost
from penstock.trainer.pipeline.pass_memory import ModelShape
from penstock.trainer.ranks.row_fetch import assign_rows

SMALL: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def cost_of(config: dict[str, Any]) -> PassCost:
    shape = ModelShape.read(config)
    assert shape is not None
    return PassCost.of(shape)


def flops(model: Any, length: int, num_logits: int) -> float:
    """Of a pass over one sample; attention counts every pair of tokens."""
    ids = torch.zeros(1, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=ids, use_cache=False, logits_to_keep=num_logits)
    return float(counter.get_total_flops())


def test_the_formula_counts_what_torch_counts() -> None:
    config: Any = cast(Any, CONFIG_MAPPING["qwen3"])(**SMALL)
    maker: Any = AutoModelForCausalLM
    model = maker.from_config(config, attn_implementation="eager")
    passes = [(64, 1), (64, 33), (128, 1), (256, 1)]
    terms = np.array([(length, length**2, logits) for length, logits in passes], np.float64)
    counted = [flops(model, length, logits) for length, logits in passes]
    per_token, per_square, per_logit = np.linalg.lstsq(terms, counted)[0]
    cost = cost_of(SMALL)
    assert per_logit / per_token == pytest.approx(cost.per_trained, rel=0.01)
    assert per_square / 2 / per_token == pytest.approx(cost.per_square, rel=0.01)  # causal: half


def test_a_token_visits_only_some_experts() -> None:
    dense, moe = (cost_of(shape.config(4)) for shape in (QWEN3_8B, QWEN3_30B_A3B))
    assert moe.per_square > dense.per_square, "fewer products next to the same attention"


def test_ranks_divide_rows_by_the_cost_of_their_own_model() -> None:
    """In a small model the pairs of a long sample cost more than its products; two ranks that
    divide rows as if it were a large one are far apart."""
    lengths_R = np.array([8000.0, *[1000.0] * 60])
    small, large = cost_of(SMALL), cost_of(QWEN3_8B.config(36))
    true_R = small.rows(lengths_R, lengths_R**2, lengths_R)

    def worst(cost: PassCost) -> float:
        costs_R = cost.rows(lengths_R, lengths_R**2, lengths_R)
        parts = assign_rows(costs_R, np.arange(lengths_R.size), 2, 1)
        return max(float(true_R[rows].sum()) for rows in parts) / (true_R.sum() / 2)

    assert worst(small) < 1.05
    assert worst(large) > 1.2
    assert worst(TYPICAL) > 1.2
