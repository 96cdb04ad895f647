# SPDX-License-Identifier: Apache-2.0
"""vLLM as an engine, in its own environment: nothing here imports it."""

from penstock.rollout.engines.vllm.engine import VllmEngine
from penstock.rollout.engines.vllm.server import (
    ChildServer,
    LoraCapacity,
    RemoteServer,
    Server,
    default_environment,
)

__all__ = [
    "ChildServer",
    "LoraCapacity",
    "RemoteServer",
    "Server",
    "VllmEngine",
    "default_environment",
]
