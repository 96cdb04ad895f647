# SPDX-License-Identifier: Apache-2.0
"""A Prometheus registry per service, and its text for a `/metrics` route.

Each service has a separate registry, so that two services in one test process do not collide.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Info, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

MEDIA_TYPE = CONTENT_TYPE_LATEST


def new_registry(service: str, run: str) -> CollectorRegistry:
    """A registry labelled with service and run."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    info = Info("penstock", "Service and run of this process.", registry=registry)
    info.info({"service": service, "run": run})
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """The body of `GET /metrics`; serve it as MEDIA_TYPE."""
    return generate_latest(registry)
