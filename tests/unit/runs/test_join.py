# SPDX-License-Identifier: Apache-2.0
"""A joined node warns before its token expires."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from penstock.runs.join import node_name, with_expiry_warnings
from penstock.wire.auth import Audience, Role, Signer, expires_at


def mint(folder: Path, ttl_s: float) -> str:
    return Signer.create(folder, "run").mint(Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=ttl_s)


async def warnings_of(token: str) -> list[str]:
    """What a node logs in its first moments."""

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    with structlog.testing.capture_logs() as logs:
        await with_expiry_warnings(work(), token)
    return [line["fix"] for line in logs]


async def test_a_token_that_is_about_to_expire_is_warned_of_once(tmp_path: Path) -> None:
    [fix] = await warnings_of(mint(tmp_path, 50.0))
    assert "penstock token RUN" in fix


async def test_a_fresh_token_and_a_foreign_one_are_no_reason_to_warn(tmp_path: Path) -> None:
    assert await warnings_of(mint(tmp_path, 24 * 3600.0)) == []
    assert await warnings_of("penstock1.nonsense.x") == []


def test_the_holder_of_a_token_can_read_when_it_expires(tmp_path: Path) -> None:
    token = mint(tmp_path, 60.0)
    signer = Signer.read(tmp_path, "run")
    assert expires_at(token) == signer.verifier(Audience.DATAFLOW).verify(token).expires_at
    assert expires_at("sk-other") is expires_at("") is None


def test_a_node_is_named_under_its_token(tmp_path: Path) -> None:
    signer = Signer.create(tmp_path, "run")
    token = signer.mint(Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=60, subject="alice")
    assert node_name(token, "host-1a2b") == "alice.host-1a2b"
    assert node_name(token, "alice") == "alice"
    assert node_name(token, "alice.gpu") == "alice.gpu"
    assert node_name(token, "alices") == "alice.alices"
