# SPDX-License-Identifier: Apache-2.0
"""The policy's model as the learner uses it: packed samples in, log-probs and entropy out.

It covers one complete forward pass, so it is also what is sharded over ranks. Logits are computed
for the trained tokens only, in chunks if there are many; a chunk is recomputed in the backward pass
instead of being kept, so their memory is bounded by `MAX_LOGITS`.

K = trained tokens, P = tokens of the line, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from penstock.trainer.attention import Rows, use_packed_attention, vocab_size
from penstock.trainer.inputs import Inputs
from penstock.trainer.losses.logprobs import Truncation, entropy, sampling_log_softmax
from penstock.trainer.losses.tokens import Tokens
from penstock.trainer.ranks.context import WHOLE_LINE
from penstock.trainer.router_replay import RouterReplay

MAX_LOGITS = 1 << 27
"""Numbers in memory at a time: 512 MB in float32."""


class Actor(nn.Module):
    gives_logprobs = True
    """Whether its outputs are log-probs, comparable with the sampling engine's."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        learns_entropy: bool = False,
        replay: RouterReplay | None = None,
    ) -> None:
        """replay: installed in the model, if it computes with recorded experts."""
        super().__init__()
        self._replay = replay
        use_packed_attention(model)
        self.model = model.eval()  # dropout would move the ratio away from 1 on unchanged weights
        self._learns_entropy = learns_entropy
        self.context = WHOLE_LINE

    def forward(self, inputs: Inputs) -> Tokens:
        if self._replay is not None:
            self._replay.use(inputs.experts_PW)
        own = inputs.own
        hidden_KD = last_hidden(self.model, own)
        num_tokens, size = hidden_KD.shape[0], max(1, MAX_LOGITS // vocab_size(self.model))
        score: Callable[..., tuple[Tensor, Tensor]] = self._score
        if num_tokens > size and torch.is_grad_enabled():
            score = partial(cast(Any, checkpoint), self._score, use_reentrant=False)
        parts = [
            score(hidden_KD[k], own.targets_K[k], *own.specs(k))
            for k in (slice(first, first + size) for first in range(0, max(num_tokens, 1), size))
        ]
        logprobs_K, entropy_K = (
            inputs.gather(torch.cat(values)) for values in zip(*parts, strict=True)
        )
        return inputs.tokens(logprobs_K, entropy_K)

    def scores(self, tokens: Tokens) -> Tensor:
        """The one number per token that an infer stage writes."""
        return tokens.logprobs_K

    def _score(
        self,
        hidden_KD: Tensor,
        targets_K: Tensor,
        temperature_K: Tensor | None,
        kept: Truncation | None,
    ) -> tuple[Tensor, Tensor]:
        head = cast(nn.Linear, self.model.get_output_embeddings())
        logits_KV = head(hidden_KD)
        logits_KV = logits_KV.to(torch.promote_types(logits_KV.dtype, torch.float32))
        logprobs_KV = sampling_log_softmax(logits_KV, targets_K, temperature_K, kept)
        with torch.set_grad_enabled(self._learns_entropy and torch.is_grad_enabled()):
            entropy_K = entropy(logprobs_KV)
        return logprobs_KV.gather(1, targets_K[:, None]).squeeze(1), entropy_K


def last_hidden(model: PreTrainedModel, inputs: Inputs) -> Tensor:
    """The last layer's state at the tokens from which the trained ones are predicted."""
    hidden_PD = decode_line(model, inputs.ids_P, inputs.positions_P, inputs.rows)
    return hidden_PD.index_select(0, inputs.predictor_K)


def decode_line(model: PreTrainedModel, ids_P: Tensor, positions_P: Tensor, rows: Rows) -> Tensor:
    """The last layer's state at every token of a line of packed samples."""
    decoder: Any = model.get_decoder()
    line = decoder(
        input_ids=ids_P[None], position_ids=positions_P[None], rows=rows, use_cache=False
    )
    return line.last_hidden_state[0]
