# SPDX-License-Identifier: Apache-2.0
"""The critic's model as the learner uses it: packed samples in, one value per trained token out.

A value belongs to the state before its token: the expected return, given the tokens before it. The
head starts at zero, so a new critic outputs 0 everywhere.

K = trained tokens, D = hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.trainer.actor import last_hidden
from penstock.trainer.advantages.gae import NEW_VALUES
from penstock.trainer.attention import use_packed_attention
from penstock.trainer.inputs import Inputs
from penstock.trainer.losses.tokens import Tokens
from penstock.trainer.ranks.context import WHOLE_LINE


class Critic(nn.Module):
    gives_logprobs = False
    exact_modules = ("head",)
    """In float32 whatever the precision: returns have many digits."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        use_packed_attention(model)
        self.model = model.eval()
        config: Any = model.config
        self.head = nn.Linear(config.hidden_size, 1, dtype=model.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.context = WHOLE_LINE

    def forward(self, inputs: Inputs) -> Tokens:
        hidden_KD = last_hidden(self.model, inputs.own)
        values_K = inputs.gather(self.head(hidden_KD.to(self.head.weight.dtype)).squeeze(1))
        nothing_K = torch.zeros_like(values_K)
        return inputs.tokens(nothing_K, nothing_K, **{NEW_VALUES: values_K})

    def scores(self, tokens: Tokens) -> Tensor:
        assert tokens.extra_columns is not None
        return tokens.extra_columns[NEW_VALUES]
