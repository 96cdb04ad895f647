# SPDX-License-Identifier: Apache-2.0
"""Which tests a machine can run, and why it skips the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.devices import visible_devices
from penstock.rollout.engines.vllm.server import default_environment

NUM_GPUS = len(visible_devices())
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
ENGINE = Path(os.environ.get("PENSTOCK_VLLM") or default_environment())
"""Virtual environment with vLLM for GPUs."""


def needs_gpus(number: int) -> list[pytest.MarkDecorator]:
    reason = f"needs {number} GPU{'' if number == 1 else 's'}, and nvidia-smi lists {NUM_GPUS}"
    return [pytest.mark.gpu, pytest.mark.skipif(number > NUM_GPUS, reason=reason)]


def needs_vllm() -> pytest.MarkDecorator:
    program = ENGINE / "bin" / "vllm"
    reason = f"needs {program}: name the environment of vLLM in PENSTOCK_VLLM"
    is_missing = NUM_GPUS > 0 and not os.access(program, os.X_OK)  # else the GPU is what is missing
    return pytest.mark.skipif(is_missing, reason=reason)


def needs_two_hosts() -> pytest.MarkDecorator:
    missing = [name for name in RANK_VARIABLES if name not in os.environ]
    reason = f"needs two hosts: set {', '.join(missing)} on both, as torchrun does"
    return pytest.mark.skipif(bool(missing), reason=reason)
