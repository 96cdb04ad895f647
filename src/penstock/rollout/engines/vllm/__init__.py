# SPDX-License-Identifier: Apache-2.0
"""vLLM as an engine, in its own environment: nothing here imports it."""

from penstock.rollout.engines.vllm.child import (
    AdapterRoom,
    ChildServer,
    RemoteServer,
    Server,
    default_environment,
)
from penstock.rollout.engines.vllm.engine import VllmEngine

__all__ = [
    "AdapterRoom",
    "ChildServer",
    "RemoteServer",
    "Server",
    "VllmEngine",
    "default_environment",
]
