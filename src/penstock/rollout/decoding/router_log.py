# SPDX-License-Identifier: Apache-2.0
"""Notes which experts a mixture's routers choose, pass by pass.

Owns the hooks on the routers, and the form of the choices. Importing this module loads torch; the
decoding thread does it.

B = rows, T = padded length, W = layers with experts × experts per token.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import EngineError
from penstock.types import ExpertChoices


class RouterLog:
    """Of one model, whose routers return (logits, weights, chosen experts)."""

    def __init__(self, model: Any) -> None:
        routers = [
            module
            for module in model.modules()
            if hasattr(module, "top_k") and hasattr(module, "num_experts")
        ]
        shapes = {(int(one.num_experts), int(one.top_k)) for one in routers}
        if len(shapes) != 1:
            raise EngineError(
                f"{type(model).__name__} has no routers whose choices could be recorded; set "
                "training.router_replay: false"
            )
        [(self._num_experts, self._num_chosen)] = shapes
        self._num_layers = len(routers)
        self._chosen: list[Tensor] = []
        self._is_noting = False
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, router: Any, inputs: Any, output: Any) -> None:
        if self._is_noting:
            self._chosen.append(output[2])

    @contextmanager
    def noting(self) -> Generator[None]:
        """Note the passes of this block: a model may be shared with other decoders."""
        self._is_noting = True
        try:
            yield
        finally:
            self._is_noting = False

    def take(self, num_rows: int, length: int) -> Tensor:
        """Chosen in the pass that was noted, B×T×W."""
        chosen, self._chosen = self._chosen, []
        assert len(chosen) == self._num_layers, "every layer chose once in a pass"
        layers = [one.to(torch.int32).view(num_rows, length, -1) for one in chosen]
        return torch.cat(layers, dim=2)

    def choices(self, chosen_TW: Tensor) -> ExpertChoices:
        """Of the tokens of one row, without padding."""
        dtype = np.uint8 if self._num_experts < 256 else np.dtype("<u2")
        return ExpertChoices(
            num_layers=self._num_layers,
            num_chosen=self._num_chosen,
            num_experts=self._num_experts,
            choices=chosen_TW.numpy().astype(dtype).tobytes(),
        )
