# SPDX-License-Identifier: Apache-2.0
"""The `vllm` engine. vLLM runs in a separate environment and process; nothing here imports it."""

from __future__ import annotations

from pathlib import Path

from penstock.rollout.engine import EngineSettings, EngineType
from penstock.rollout.engines.vllm.engine import VllmEngine
from penstock.rollout.engines.vllm.server import ChildServer, RemoteServer, default_environment


def _build(settings: EngineSettings) -> VllmEngine:
    if settings.url:
        return VllmEngine(
            RemoteServer(settings.url),
            keeps_kv=settings.keeps_kv,
            records_experts=settings.records_experts,
        )
    environment = Path(settings.environment).expanduser() if settings.environment else None
    server = ChildServer(
        environment or default_environment(),
        settings.options,
        devices=settings.devices,
        state_dir=settings.state_dir,
        num_policies=settings.num_policies,
        adapter_rank=settings.adapter_rank,
        records_experts=settings.records_experts,
    )
    return VllmEngine(server, keeps_kv=settings.keeps_kv, records_experts=settings.records_experts)


ENGINE = EngineType(build=_build, serves_adapters=True, records_experts=True)
