# SPDX-License-Identifier: Apache-2.0
"""AdamW whose moments are in host memory between updates.

An update takes one parameter after another: its moments go to the device, the optimizer updates it
there, and they come back. So the device holds the moments of one parameter at a time, and the
result is bit for bit the one of the optimizer alone. Where the device is the CPU itself, the copies
are made all the same, and save nothing.

Owns where moments are, not what they are; the counter of steps, one number, stays on the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.trainer.ranks.regions import as_dtensor, local, region_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class HostMoments:
    """Updates the parameters of an optimizer."""

    def __init__(self, optimizer: torch.optim.AdamW) -> None:
        self._optimizer = optimizer
        self.num_moved_bytes = 0
        """Between device and host, both ways, since the start."""

    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        groups = self._optimizer.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(group, parameter)
        finally:
            self._optimizer.param_groups = groups
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # a checkpoint reads the host's copies

    def store(self, parameter: Tensor) -> None:
        """Move the moments of this parameter to the host; later ones reuse the memory."""
        self._store(parameter, {})

    def _update(self, group: dict[str, Any], parameter: Tensor) -> None:
        state: dict[str, Any] = self._optimizer.state[parameter]
        kept = {key: state[key] for key in MOMENTS if key in state}
        for key, moment in kept.items():
            state[key] = self._to_device(moment, parameter)
        self._optimizer.param_groups = [{**group, "params": [parameter]}]
        self._optimizer.step()
        self._store(parameter, kept)

    def _to_device(self, kept: Tensor, parameter: Tensor) -> Tensor:
        moved = local(kept).to(local(parameter).device, non_blocking=True, copy=True)
        self.num_moved_bytes += moved.nbytes
        return moved if region_of(parameter) is None else as_dtensor(moved, parameter)

    def _store(self, parameter: Tensor, kept: dict[str, Tensor]) -> None:
        state: dict[str, Any] = self._optimizer.state[parameter]
        is_pinned = local(parameter).device.type != "cpu"
        for key in MOMENTS:
            target = kept.get(key)
            if target is None:
                target = torch.empty_like(parameter, device="cpu", pin_memory=is_pinned)
            local(target).copy_(local(state[key]), non_blocking=True)
            self.num_moved_bytes += local(target).nbytes
            state[key] = target.detach()
