# SPDX-License-Identifier: Apache-2.0
"""The dataflow refuses an address before it opens its ledger or says that it serves."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog

from penstock.config import demo_config
from penstock.dataflow.service.server import serve_dataflow
from penstock.errors import ConfigError
from penstock.wire.auth import Audience, Signer


async def test_an_address_off_loopback_is_refused_before_anything_is_said(tmp_path: Path) -> None:
    config = demo_config(0)
    verifier = Signer.create(tmp_path / "keys", config.name).verifier(Audience.DATAFLOW)
    with structlog.testing.capture_logs() as logs, pytest.raises(ConfigError, match="TLS"):
        await serve_dataflow(
            config,
            tmp_path,
            host="0.0.0.0",
            port=0,
            weights_url="",
            verifier=verifier,
            partition_urls={},
        )
    assert logs == [] and not (tmp_path / "ledger").exists()
