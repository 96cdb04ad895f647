# SPDX-License-Identifier: Apache-2.0
"""What one reader of weights asks for does not hold up the others."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import httpx2
import pytest
from tests.contract.test_weight_server import bearer, http, manifest_digest, signer

from penstock.weights.manifest import SnapshotManifest, parse_manifest
from penstock.weights.serving import server
from penstock.wire.auth import Signer

__all__ = ["http", "signer"]


async def test_a_manifest_is_packed_once_and_not_in_the_loop(
    tmp_path: Path, signer: Signer, http: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a mixture with 90,000 tensors it takes half a second: two readers that asked again and
    again had the server, for all nodes."""
    threads: list[int] = []

    def parse(data: bytes) -> SnapshotManifest:
        threads.append(threading.get_ident())
        return parse_manifest(data)

    monkeypatch.setattr(server, "parse_manifest", parse)
    path = f"/v1/updates/{manifest_digest(tmp_path)}?from="
    asked = [http.get(path + f"{n:064x}", headers=bearer(signer)) for n in range(20)]
    answers = await asyncio.gather(*asked)
    assert {one.status_code for one in answers} == {200}
    assert len({one.content for one in answers}) == 1
    assert len(threads) == 1 and threads != [threading.get_ident()]
