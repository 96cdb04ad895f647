# SPDX-License-Identifier: Apache-2.0
"""A gateway on loopback for the tests of its HTTP surface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.gateway.gateway_harness import GatewayHarness, running_gateway


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[GatewayHarness]:
    async with running_gateway(tmp_path) as running:
        yield running
