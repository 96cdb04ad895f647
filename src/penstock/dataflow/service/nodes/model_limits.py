# SPDX-License-Identifier: Apache-2.0
"""What a run's models can hold: context window and vocabulary, from the config.json of each.

Owns the bounds of a delivered row that depend on the model. A model whose files are not on this
machine has the general ones; its trainer applies its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.hub import TINY_QWEN3, TINY_WINDOW, find_folder, read_text_file
from penstock.types import PolicyName

MAX_WINDOW = 1 << 20
"""Tokens of one context, for a model whose own window is not known."""
MAX_TOKEN_ID = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    windows: Mapping[PolicyName, int] = field(default_factory=dict[PolicyName, int])
    """Tokens of one context, answer included, by policy."""
    max_id: int = MAX_TOKEN_ID
    """The largest token id of any policy."""
    experts: Mapping[PolicyName, ExpertLimits | None] = field(
        default_factory=dict[PolicyName, "ExpertLimits | None"]
    )
    """By policy whose model is known; None for one that is not a mixture of experts."""

    @property
    def narrowest(self) -> int:
        """No context up to this length is too long for any policy."""
        return min(self.windows.values(), default=MAX_WINDOW)

    def window(self, policy: PolicyName) -> int:
        return self.windows.get(policy, MAX_WINDOW)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLimits:
    """Of a mixture of experts."""

    max_layers: int
    num_experts: int
    num_chosen: int
    """Experts per token."""


def read_model_limits(models: Mapping[str, str]) -> ModelLimits:
    """models: name of the initial model, by policy."""
    windows: dict[PolicyName, int] = {}
    sizes: list[int | None] = []
    experts: dict[PolicyName, ExpertLimits | None] = {}
    for policy, init in models.items():
        config = _read_config(init)
        sizes.append(_number(config, "vocab_size"))
        if window := _number(config, "max_position_embeddings"):
            windows[PolicyName(policy)] = window
        if config:
            experts[PolicyName(policy)] = _expert_limits(config)
    known = [size for size in sizes if size is not None]
    is_known = known and len(known) == len(sizes)
    max_id = max(known) - 1 if is_known else MAX_TOKEN_ID
    return ModelLimits(windows=windows, max_id=max_id, experts=experts)


def _expert_limits(config: Mapping[str, Any]) -> ExpertLimits | None:
    layers, chosen = (_number(config, n) for n in ("num_hidden_layers", "num_experts_per_tok"))
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    num_experts = next((found for name in names if (found := _number(config, name))), None)
    if layers is None or chosen is None or num_experts is None:
        return None
    return ExpertLimits(max_layers=layers, num_experts=num_experts, num_chosen=chosen)


def _read_config(init: str) -> dict[str, Any]:
    """Empty if the model is not here; its trainer reports what is wrong with it."""
    if init == TINY_QWEN3:
        return {"max_position_embeddings": TINY_WINDOW}
    folder = find_folder(init, texts_only=True)
    try:
        return {} if folder is None else json.loads(read_text_file(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return {}


def _number(config: Mapping[str, Any], name: str) -> int | None:
    """A positive number of the model, or of its text part if it is multimodal."""
    text: Mapping[str, Any] = config.get("text_config") or {}
    for part in (config, text):
        value = part.get(name)
        if isinstance(value, int) and value > 0:
            return value
    return None
