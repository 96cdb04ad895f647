# SPDX-License-Identifier: Apache-2.0
"""`penstock relay`, its tokens, and the relay options of nodes: every mistake gets a message that
says how to fix it."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.config import demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Audience, Role, Signer, Verifier

RUN = "reverse"
AWAY = "http://127.0.0.1:1"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was started once."""
    folder = RunFolder(tmp_path / "run")
    folder.write_config(demo_config(0))
    folder.allocate_endpoints(tmp_path, ())
    Signer.create(folder.keys, RUN)
    return folder


def error_of(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The error message of a command that fails."""
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code != 0
    return capsys.readouterr().err


def minted(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["token", *map(str, words)])
    assert ended.value.code == 0
    captured = capsys.readouterr()
    return captured.out.strip(), captured.err


def audiences(folder: RunFolder, token: str) -> set[Audience]:
    signer = Signer.read(folder.keys, RUN)
    credential = signer.verifier(Audience.RELAY).verify(token)
    return {Audience(each) for each in credential.audiences}


def test_a_relay_token_is_only_valid_for_weights_and_relays(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    token, err = minted(capsys, folder.path, "--role", "relay")
    assert audiences(folder, token) == {Audience.WEIGHTS, Audience.RELAY}
    assert f"penstock relay {folder.endpoints().weights} --public-key={folder.public_key()}" in err
    assert "--token-file" in err
    out, _ = minted(capsys, folder.path, "--role", "relay", "--json")
    found = json.loads(out)
    assert (found["url"], found["public_key"]) == (folder.endpoints().weights, folder.public_key())
    assert (
        Verifier.from_token(found["token"], found["public_key"], audience=Audience.RELAY).run == RUN
    )


def test_a_token_for_relays_is_only_valid_for_relays(
    capsys: pytest.CaptureFixture[str], folder: RunFolder
) -> None:
    token, err = minted(capsys, folder.path, "--for-relay")
    assert audiences(folder, token) == {Audience.RELAY}
    assert "--relay-token-file" in err


def test_each_mistake_at_the_start_has_a_message(
    capsys: pytest.CaptureFixture[str],
    folder: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = folder.token(RUN, Role.RELAY, ttl_s=3600)
    key = f"--public-key={folder.public_key()}"
    rest = ("--cache", tmp_path / "cache", "--port", 18999)

    def start(*words: object, shown: str = token) -> str:
        (tmp_path / "token").write_text(shown)
        monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "token"))
        return error_of(capsys, "relay", *words)

    assert "does not contain one token" in start(AWAY, key, *rest, shown="")
    monkeypatch.delenv("PENSTOCK_TOKEN_FILE", raising=False)
    assert "penstock token RUN --role relay --out" in error_of(capsys, "relay", AWAY, key, *rest)
    assert "not a URL" in start("127.0.0.1:1", key, *rest)
    assert "is not a run's public key" in start(AWAY, "--public-key=nonsense", *rest)
    other = Signer.create(tmp_path / "other", RUN).mint(Role.RELAY, [Audience.RELAY], ttl_s=3600)
    assert "does not match this run's key" in start(AWAY, key, *rest, shown=other)
    expired = folder.token(RUN, Role.RELAY, ttl_s=-1)
    assert "has expired" in start(AWAY, key, *rest, shown=expired)
    assert "without TLS" in start(AWAY, key, *rest, "--host", "0.0.0.0")
    assert "must be greater than 0 GB" in start(AWAY, key, *rest, "--max-gb", "0")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} on 127.0.0.1 is already in use" in start(
            AWAY, key, *rest[:2], "--port", port
        )
    assert "--public-key" in start(AWAY, *rest)
    assert "--cache is required" in start(AWAY, key, *rest[2:])
    assert "remove --cache and --upstream" in start("s3://bucket/run", key, *rest)
    (tmp_path / "cache").mkdir()
    file = folder.keys / "public.key"
    assert "no public key" not in start(AWAY, f"--public-key={file}", *rest, "--max-gb", "0")


def test_a_node_needs_its_own_token_for_a_relay(
    capsys: pytest.CaptureFixture[str], folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.path))

    def start(*words: object) -> str:
        (folder.path / "token").write_text(folder.token(RUN, Role.ROLLOUT, ttl_s=3600))
        monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(folder.path / "token"))
        return error_of(capsys, "join", AWAY, *words)

    assert "penstock token RUN --for-relay" in start("--relay", AWAY)
    assert "--public-key is required" in start("--serve-weights", "127.0.0.1:18999")
    assert "expected HOST:PORT" in start("--serve-weights", "18999")
    assert "without TLS" in start("--serve-weights", "0.0.0.0:18999")
