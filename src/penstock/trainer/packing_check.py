# SPDX-License-Identifier: Apache-2.0
"""Checks that packing samples does not change a model's log-probs.

Packing takes a model apart: its decoder runs over one line of samples with our attention instead of
the model's, and its head over the trained tokens only. An architecture that carries state from
token to token outside attention, bends its attention scores or scales its logits would give other
log-probs there, or let one sample leak into the next, and nothing would fail. So the model itself
is tested before anything is trained. A short test cannot detect what shows on long samples only:
position encodings that change with the longest sample of a line are known by name.

P = tokens of the line, V = vocabulary.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.errors import ConfigError
from penstock.trainer.actor import decode_line
from penstock.trainer.attention import make_attention_layout, use_packed_attention, vocab_size

LENGTHS = (5, 12)
"""Lengths of the test samples, packed one after another."""
MAX_DIFFERENCE = 1e-3
"""Largest difference of log-probs in float32; models that fit stay below a tenth of it."""
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary encodings that depend on the longest sample in the line."""
_STRIDE = 7919
"""Token ids far apart, the same on every machine."""


@torch.no_grad()
def require_packable(model: PreTrainedModel) -> None:
    """Refuse a model whose log-probs change when samples are packed. Installs packed attention in
    it."""
    _check_rope_type(model)
    ids_P = torch.arange(1, sum(LENGTHS) + 1, device=model.device) * _STRIDE % vocab_size(model)
    samples = ids_P.split(LENGTHS)
    alone: Any = [model(input_ids=ids[None], use_cache=False).logits[0] for ids in samples]
    use_packed_attention(model)
    try:
        packed_PV = _packed_logits(model, ids_P)
    except (AttributeError, TypeError) as error:
        raise _refused(model, f"its layers do not take a line of samples ({error})") from error
    difference = (torch.cat(alone).log_softmax(-1) - packed_PV.log_softmax(-1)).abs().max().item()
    if not difference <= MAX_DIFFERENCE:
        raise _refused(
            model,
            f"the log-probs of a packed sample differ by {difference:.2g} from the "
            "unpacked sample's. Its layers mix tokens outside attention, or it scales or bends "
            "scores in its own way",
        )


def _check_rope_type(model: PreTrainedModel) -> None:
    """Found where transformers keeps them, for all layers or by kind of layer."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind in LENGTH_DEPENDENT_ROPE:
                raise _refused(
                    model,
                    f"its positions are encoded by the {kind} rule, after the longest sample of a "
                    "line: the log-probs of a sample would change with the others in the line",
                )


def _refused(model: PreTrainedModel, why: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__} cannot be trained packed: {why}; use a model with standard "
        "attention, such as Qwen3, Llama, Mistral, SmolLM or Phi-3 without longrope"
    )


def _packed_logits(model: PreTrainedModel, ids_P: Tensor) -> Tensor:
    """As the actor makes them."""
    rows = make_attention_layout(np.array(LENGTHS, np.int64)).to(ids_P.device)
    positions = [torch.arange(length, device=ids_P.device) for length in LENGTHS]
    hidden_PD = decode_line(model, ids_P, torch.cat(positions), rows)
    return cast(nn.Linear, model.get_output_embeddings())(hidden_PD)
