# SPDX-License-Identifier: Apache-2.0
"""vLLM as an engine, in its own environment: nothing here imports it."""

from penstock.rollout.engines.vllm.engine import VllmEngine
from penstock.rollout.engines.vllm.server import (
    AdapterRoom,
    ChildServer,
    RemoteServer,
    Server,
    default_environment,
)

__all__ = [
    "AdapterRoom",
    "ChildServer",
    "RemoteServer",
    "Server",
    "VllmEngine",
    "default_environment",
]
