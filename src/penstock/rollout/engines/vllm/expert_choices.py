# SPDX-License-Identifier: Apache-2.0
"""The experts that vLLM chose, as its generate route returns them: a base64 text of an .npy file,
tokens × layers × experts per token, without the last token, which was not computed.

Owns the option that makes vLLM return them and the refusal where it cannot: its CPU build lacks the
kernels (they are written in Triton), and streamed answers do not carry them.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from penstock.errors import EngineError
from penstock.types import NO_CHOICE, ExpertChoices

OPTION = "--enable-return-routed-experts"
NO_EXPERTS = (
    f"start it with `{OPTION}` on a GPU (its CPU build cannot return them), use engine: hf, or set "
    "training.router_replay: false"
)


def read_experts(text: str | None, num_experts: int, num_tokens: int) -> ExpertChoices:
    """num_tokens: of prompt and answer. Raises EngineError if vLLM returned none, or others."""
    if text is None:
        raise EngineError(f"vLLM returned no expert choices; {NO_EXPERTS}")
    try:
        found: Any = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
        tokens, layers, chosen = found.shape
    except (ValueError, EOFError, AttributeError) as error:
        raise EngineError(f"cannot read vLLM's expert choices: {error}; use vLLM 0.32") from None
    is_known = found.dtype.kind in "ui" and 0 < tokens < num_tokens and layers and chosen
    if not is_known or not 0 <= int(found.min()) <= int(found.max()) < num_experts:
        raise EngineError(
            f"vLLM's expert choices have the shape {found.shape} and type {found.dtype} for "
            f"{num_tokens} tokens and {num_experts} experts; use vLLM 0.32"
        )
    dtype = np.uint8 if num_experts < 256 else np.dtype("<u2")
    known = ExpertChoices(
        num_layers=layers,
        num_chosen=chosen,
        num_experts=num_experts,
        choices=found.astype(dtype).tobytes(),
    )
    uncomputed = NO_CHOICE * known.token_bytes
    return ExpertChoices(
        num_layers=layers,
        num_chosen=chosen,
        num_experts=num_experts,
        choices=known.last(num_tokens - 1).choices + uncomputed,
    )
