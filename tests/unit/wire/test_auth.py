# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import stat
from pathlib import Path

import pytest

from penstock.errors import ConfigError, Forbidden, Unauthorized
from penstock.wire.auth import Audience, Role, Signer, Verifier
from penstock.wire.serving import Tls, require_tls_off_loopback
from penstock.wire.trust import refuse_clear_text


def test_a_token_identifies_its_caller_and_is_limited_to_its_audiences(tmp_path: Path) -> None:
    signer = Signer.create(tmp_path, "run")
    token = signer.mint(Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=60, subject="laptop")
    verifier = Verifier.read(tmp_path, run="run", audience=Audience.DATAFLOW)
    credential = verifier.verify(token)
    assert (credential.role, credential.subject) == (Role.ROLLOUT, "laptop")
    with pytest.raises(Forbidden, match="weights"):
        Verifier.read(tmp_path, run="run", audience=Audience.WEIGHTS).verify(token)
    with pytest.raises(Forbidden, match="belongs to run"):
        Verifier.read(tmp_path, run="other", audience=Audience.DATAFLOW).verify(token)


def test_a_token_that_was_valid_expires(tmp_path: Path) -> None:
    signer = Signer.create(tmp_path, "run")
    verifier = signer.verifier(Audience.DATAFLOW)
    token = signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=60)
    expires_at = verifier.verify(token).expires_at
    with pytest.raises(Unauthorized, match="expired"):
        verifier.verify(token, now=expires_at)


def test_every_changed_character_is_detected(tmp_path: Path) -> None:
    signer = Signer.create(tmp_path, "run")
    verifier = signer.verifier(Audience.DATAFLOW)
    token = signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=60)
    for index in range(len(token)):
        forged = token[:index] + ("A" if token[index] != "A" else "B") + token[index + 1 :]
        with pytest.raises(Unauthorized):
            verifier.verify(forged)


@pytest.mark.parametrize(
    "token", ["", ".", "penstock1", "penstock1..", "x" * 10_000, "penstock1.é.é"]
)
def test_an_invalid_token_is_unauthorized(tmp_path: Path, token: str) -> None:
    with pytest.raises(Unauthorized):
        Signer.create(tmp_path, "run").verifier(Audience.DATAFLOW).verify(token)


def test_the_signing_key_is_private_and_created_once(tmp_path: Path) -> None:
    first = Signer.create(tmp_path, "run").mint(Role.READER, [Audience.DATAFLOW], ttl_s=60)
    for name in ("root.key", "signing.key", "renewal.key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    Signer.create(tmp_path, "run").verifier(Audience.DATAFLOW).verify(first)
    with pytest.raises(ConfigError, match=r"no key signing\.key"):
        Signer.read(tmp_path / "elsewhere", "run")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.org", ""])
def test_nothing_listens_beyond_loopback_without_tls(host: str) -> None:
    with pytest.raises(ConfigError, match="TLS"):
        require_tls_off_loopback(host, None)
    require_tls_off_loopback(host, Tls(certificate=Path("cert.pem"), key=Path("key.pem")))


@pytest.mark.parametrize(
    "url", ["http://10.0.0.1:18080", "http://example.org", "http://[fe80::1]:1", "http://0.0.0.0:1"]
)
def test_no_token_is_sent_in_clear_text_beyond_loopback(url: str) -> None:
    with pytest.raises(ConfigError, match=r"clear text. Use https://.*or a tunnel: .ssh -N -L"):
        refuse_clear_text(url)
    refuse_clear_text(url.replace("http:", "https:"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:18080", "[::1]:18080"])
def test_on_this_machine_clear_text_is_fine(host: str) -> None:
    refuse_clear_text(f"http://{host}")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    require_tls_off_loopback(host, None)
