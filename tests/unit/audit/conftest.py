# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.unit.audit.ledgers import eventful_run


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An intact run, stopped in the middle of its work; read-only."""
    run_dir = tmp_path_factory.mktemp("runs") / "original"
    asyncio.run(eventful_run(run_dir))
    return run_dir


@pytest.fixture
def run_dir(original: Path, tmp_path: Path) -> Path:
    """A copy of it to corrupt."""
    return shutil.copytree(original, tmp_path / "run")
