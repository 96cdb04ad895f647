# SPDX-License-Identifier: Apache-2.0
"""Which device a trainer's process computes on."""

from __future__ import annotations

import torch

from penstock.errors import ConfigError

CPU = torch.device("cpu")


def select_device(local_rank: int = 0) -> torch.device:
    """The GPU that is this rank's own among those of its host; the processor where there is none.
    From now on it is the process's current one."""
    if not torch.cuda.is_available():
        return CPU
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise ConfigError(
            f"rank {local_rank} of this host has no GPU of its own: there are {num_devices}; lower "
            "training.parallel, start ranks on more hosts, or show more of them in "
            "CUDA_VISIBLE_DEVICES (empty: train on the processor)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
