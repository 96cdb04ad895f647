# SPDX-License-Identifier: Apache-2.0
"""A Prometheus registry per service, so that two services in one test process do not collide."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Info, PlatformCollector, ProcessCollector


def new_registry(service: str, run: str) -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    info = Info("penstock", "Service and run of this process.", registry=registry)
    info.info({"service": service, "run": run})
    return registry
