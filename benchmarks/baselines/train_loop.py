# SPDX-License-Identifier: Apache-2.0
"""A bare PyTorch loop over packed micro-batches: PPO's clipped loss, AdamW, nothing else.

Samples stand in one line with their own positions; transformers masks one from another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


class Packed(NamedTuple):
    """One micro-batch; the last five are by trained token."""

    ids: Tensor
    positions: Tensor
    picked: Tensor
    targets: Tensor
    sampling: Tensor
    advantages: Tensor
    weights: Tensor


class TrainLoop:
    def __init__(self, folder: Path, rate: float) -> None:
        self.model: Any = cast(Any, AutoModelForCausalLM).from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model.eval()
        self._optimizer: Any = torch.optim.AdamW(
            self.model.parameters(), lr=rate, weight_decay=0.01, fused=True
        )

    def step(self, parts: Sequence[Packed], precision: torch.dtype) -> float:
        for part in parts:
            with torch.autocast("cpu", precision, enabled=precision is not torch.float32):
                logits = self.model(
                    input_ids=part.ids[None],
                    position_ids=part.positions[None],
                    use_cache=False,
                    logits_to_keep=part.picked,
                ).logits[0]
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            logprobs = logprobs.gather(1, part.targets[:, None]).squeeze(1)
            ratio = (logprobs - part.sampling).exp()
            kept = ratio.clamp(0.8, 1.2)
            loss: Any = (
                -torch.minimum(ratio * part.advantages, kept * part.advantages) * part.weights
            )
            loss.sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(norm)
