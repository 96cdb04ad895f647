# SPDX-License-Identifier: Apache-2.0
"""Which device a trainer's process computes on."""

from __future__ import annotations

import torch

from penstock.errors import ConfigError

CPU = torch.device("cpu")


def select_device(local_rank: int = 0) -> torch.device:
    """This rank's GPU on its host, or the CPU if there is none; it becomes the process's current
    device."""
    if not torch.cuda.is_available():
        return CPU
    num_devices = torch.cuda.device_count()
    if local_rank >= num_devices:
        raise ConfigError(
            f"rank {local_rank} of this host has no GPU: there are {num_devices}; lower "
            "training.parallel, start ranks on more hosts, or show more of them in "
            "CUDA_VISIBLE_DEVICES (empty: train on the CPU)"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
