# SPDX-License-Identifier: Apache-2.0
"""Router replay: a mixture of experts computes each token with the experts that the engine chose.

Engine and trainer round differently, and where two experts score almost the same, they choose
differently: the log-probs of such a token are of another function. With the recorded choices the
trainer differentiates the function that was sampled from. The weights of the chosen experts are the
trainer's own router's, so the router learns.

Owns the forward pass of the routers; refuses a model whose routers it does not understand.

P = tokens of the line, E = experts, K = experts per token, W = bytes per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.errors import ConfigError
from penstock.trainer.samples import ExpertShape

MAX_DIFFERENCE = 1e-2
"""Of a router's weights, computed here and by itself for its own choice; bfloat16 rounds to
4e-3."""


class RouterReplay:
    """Installed in a model before its layers are sharded."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.shape = expert_shape(model)
        self._experts_PW: Tensor | None = None
        self._is_checked = False
        for layer, router in enumerate(_routers(model)):
            router.forward = partial(self._route, router, router.forward, layer)

    def use(self, experts_PW: Tensor | None) -> None:
        """Compute with these until the next call, also what a backward pass computes again."""
        self._experts_PW = experts_PW

    def _route(
        self, router: Any, forward: Callable[..., Any], layer: int, hidden: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        logits_PE, weights_PK, own_PK = forward(hidden)
        if self._experts_PW is None:
            return logits_PE, weights_PK, own_PK
        if not self._is_checked:
            _check(router, logits_PE, weights_PK, own_PK)
            self._is_checked = True
        recorded_PK = self._recorded(self._experts_PW, layer)
        is_missing_P1 = (recorded_PK >= self.shape.num_experts).any(dim=1, keepdim=True)
        chosen_PK = torch.where(is_missing_P1, own_PK, recorded_PK)
        return logits_PE, _weights(router, logits_PE, chosen_PK), chosen_PK

    def _recorded(self, experts_PW: Tensor, layer: int) -> Tensor:
        """Of one layer, P×K; no expert has the number of a missing choice."""
        item_bytes = self.shape.none.item_bytes
        size = item_bytes * self.shape.num_chosen
        own_PW = experts_PW[:, layer * size : (layer + 1) * size].to(torch.int64)
        return own_PW if item_bytes == 1 else own_PW[:, ::2] + (own_PW[:, 1::2] << 8)


def _routers(model: PreTrainedModel) -> list[Any]:
    """Modules that choose experts, in the order of their layers."""
    return [
        module
        for module in model.modules()
        if hasattr(module, "top_k") and hasattr(module, "num_experts")
    ]


def expert_shape(model: PreTrainedModel) -> ExpertShape:
    """What the model chooses for one token."""
    routers = _routers(model)
    shapes = {(int(one.num_experts), int(one.top_k)) for one in routers}
    if len(shapes) != 1:
        raise ConfigError(
            f"{type(model).__name__} has no routers whose choices could be replayed; set "
            "training.router_replay: false"
        )
    [(num_experts, num_chosen)] = shapes
    return ExpertShape(num_layers=len(routers), num_chosen=num_chosen, num_experts=num_experts)


def _check(router: Any, logits_PE: Tensor, weights_PK: Tensor, own_PK: Tensor) -> None:
    """A router that weighs experts in another way must not be replaced."""
    difference = (_weights(router, logits_PE, own_PK) - weights_PK).abs().max().item()
    if not difference <= MAX_DIFFERENCE:
        raise ConfigError(
            f"{type(router).__name__} weighs its experts in its own way (by {difference:.2g} "
            "differently), so its choices cannot be replayed; set training.router_replay: false"
        )


def _weights(router: Any, logits_PE: Tensor, chosen_PK: Tensor) -> Tensor:
    """Of the chosen experts: their probabilities, or their shares of these."""
    weights_PK = logits_PE.softmax(dim=-1, dtype=torch.float32).gather(1, chosen_PK)
    if getattr(router, "norm_topk_prob", True):
        weights_PK = weights_PK / weights_PK.sum(dim=-1, keepdim=True)
    return weights_PK.to(logits_PE.dtype)
