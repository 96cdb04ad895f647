# SPDX-License-Identifier: Apache-2.0
"""A gateway on loopback for the tests of its HTTP surface."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.unit.gateway.gateway_harness import Stage, on_stage


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    async with on_stage(tmp_path) as running:
        yield running
