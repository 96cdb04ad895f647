# SPDX-License-Identifier: Apache-2.0
"""A joined process renews its token, warns before the end of one that it cannot renew, and has a
name that its token allows."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import structlog
from tests.contract.dataflow_server import serving

from penstock.runs.credential_upkeep import with_upkeep
from penstock.runs.join import node_name
from penstock.wire.auth import Audience, Renewer, Role, Signer, expires_at
from penstock.wire.held_token import HeldToken, held
from penstock.wire.server import build_app


def mint(folder: Path, ttl_s: float) -> str:
    return Signer.create(folder, "run").mint(Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=ttl_s)


async def warnings_of(token: str) -> list[str]:
    """What a node logs in its first moments; the server of another test may log meanwhile."""

    async def work() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    with structlog.testing.capture_logs() as logs:
        await with_upkeep(work(), held(token), urls=[])
    return [line["fix"] for line in logs if line["event"].startswith("token expires")]


async def test_a_token_that_is_about_to_expire_is_warned_of_once(tmp_path: Path) -> None:
    [fix] = await warnings_of(mint(tmp_path, 50.0))
    assert "penstock token RUN" in fix


async def test_a_fresh_token_and_a_foreign_one_are_no_reason_to_warn(tmp_path: Path) -> None:
    assert await warnings_of(mint(tmp_path, 24 * 3600.0)) == []
    assert await warnings_of("penstock2.nonsense.x") == []


def test_the_holder_of_a_token_can_read_when_it_expires(tmp_path: Path) -> None:
    token = mint(tmp_path, 60.0)
    signer = Signer.read(tmp_path, "run")
    assert expires_at(token) == signer.verifier(Audience.DATAFLOW).verify(token).expires_at
    assert expires_at("sk-other") is expires_at("") is None


def test_a_node_is_named_under_the_name_of_its_token(tmp_path: Path) -> None:
    signer = Signer.create(tmp_path, "run")
    token = signer.mint(Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=60, subject="laptop")
    assert node_name(token, "laptop") == "laptop"
    assert node_name(token, "laptop.2") == "laptop.2"
    assert node_name(token, "gpu-1") == "laptop.gpu-1"
    assert node_name(token, "laptops") == "laptop.laptops"
    assert node_name(mint(tmp_path, 60), "anything") == "anything"


@pytest.mark.parametrize("is_file", [True, False])
async def test_a_token_is_renewed_before_it_expires_and_kept(tmp_path: Path, is_file: bool) -> None:
    signer = Signer.create(tmp_path / "keys", "run")
    token = signer.mint(Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=60, renew_s=7200, subject="a")
    verifier = signer.verifier(Audience.DATAFLOW)
    verifier.renewer = Renewer(tmp_path / "keys")
    file = tmp_path / "token"
    file.write_text(token)
    own = HeldToken.from_file(file) if is_file else held(token)

    async def work() -> None:
        while own.value() == token:  # noqa: ASYNC110  # the holder reports nothing
            await asyncio.sleep(0.01)

    with serving(build_app([], verifier, title="test")) as url:
        await with_upkeep(work(), own, urls=[url])
    assert own.value() != token
    assert verifier.verify(own.value()).expires_at > verifier.verify(token).expires_at + 1800
    assert file.read_text().strip() == (own.value() if is_file else token)


async def test_an_unreachable_run_does_not_end_the_work(tmp_path: Path) -> None:
    signer = Signer.create(tmp_path, "run")
    token = signer.mint(Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=60, renew_s=7200)
    done: list[bool] = []

    async def work() -> None:
        await asyncio.sleep(0.1)
        done.append(True)

    await with_upkeep(work(), held(token), urls=["http://127.0.0.1:9"])
    assert done == [True]


def test_a_renewed_token_is_held_although_its_file_cannot_be_written(tmp_path: Path) -> None:
    """As with a secret that is mounted read-only: the old token of the file does not come back."""
    old, new = mint(tmp_path / "keys", 60.0), mint(tmp_path / "keys", 7200.0)

    def store(token: str) -> None:
        raise OSError("read-only file system")

    own = HeldToken(lambda: old, store)
    own.replace(new)
    assert own.value() == own.reload() == new
