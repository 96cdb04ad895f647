# SPDX-License-Identifier: Apache-2.0
"""Credentials hold: what is not exactly the token that the run issued, unexpired and unrevoked, is
refused; and no token leaves by a proxy, a command line, an environment, a log or clear text."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import io
import json
import logging
import os
import resource
import socket
import stat
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.attacks.in_process import dataflow_door
from tests.contract.dataflow_server import dataflow, serving, small_config
from tests.e2e.system import until

from penstock.cli.main import main
from penstock.config import demo_config
from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.core.leasing import RegisterRequest
from penstock.dataflow.service.build import build
from penstock.errors import ConfigError, Forbidden, PenstockError, Unauthorized, Unreachable
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.service_tokens import write_token
from penstock.runs import tokens
from penstock.runs.credential_upkeep import with_upkeep
from penstock.types import NodeId
from penstock.wire import auth, denied, keys
from penstock.wire.auth import (
    PREFIX,
    RENEWED_TTL_S,
    Audience,
    Credential,
    Renewer,
    Role,
    Signer,
    Verifier,
    read_unverified,
)
from penstock.wire.client import AsyncServiceClient, ServiceClient
from penstock.wire.credential_routes import RENEW_ROUTE, RenewedToken
from penstock.wire.denied import CHECK_S, Denied, DenyList
from penstock.wire.held_token import HeldToken, held
from penstock.wire.keys import KeyUse, b64decode, b64encode
from penstock.wire.routes import Health
from penstock.wire.server import build_app

B64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


@contextmanager
def answering(response: bytes) -> Generator[tuple[str, list[bytes]]]:
    """A server that gives one response to everything, and what it was sent."""
    seen: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                seen.append(connection.recv(65536))
                connection.sendall(response)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", seen
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


OK = (
    b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b'content-length: 15\r\n\r\n{"status":"ok"}'
)


@pytest.mark.finding(11)
@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_gets_no_token(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Proves that variables of the environment cannot redirect calls that carry a token."""
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    with answering(OK) as (proxy, at_proxy), answering(OK) as (service, at_service):
        monkeypatch.setenv(variable, proxy)
        with closing(ServiceClient(service, "penstock.SECRET")) as client:
            client.call("GET", "/healthz", None, Health, deadline_s=5.0)
    assert at_proxy == []
    assert b"SECRET" in at_service[0]


@pytest.mark.finding(13)
@pytest.mark.parametrize(
    "value", ["1.2.3", "nan", "inf", "-1", "1e999", "9" * 400, "٣", "Wed, 21 Oct 2026 07:28:00 GMT"]
)
def test_a_bad_retry_after_neither_raises_nor_freezes(value: str) -> None:
    """Proves that a hostile Retry-After costs at most a bounded wait, and is a typed error."""
    head = (
        f"HTTP/1.1 503 x\r\nconnection: close\r\ncontent-length: 0\r\nretry-after: {value}\r\n\r\n"
    )
    started = time.monotonic()
    with (
        answering(head.encode()) as (url, seen),
        closing(ServiceClient(url, "token")) as client,
        pytest.raises(Unreachable),
    ):
        client.call("GET", "/healthz", None, Health, deadline_s=0.3)
    assert len(seen) >= 1
    assert time.monotonic() - started < 60.0


@pytest.mark.finding(18)
def test_only_one_form_of_a_token_verifies(tmp_path: Path) -> None:
    """Proves that no second spelling of a valid token is accepted: one token, one form."""
    signer = Signer.create(tmp_path, "run")
    verifier = signer.verifier(Audience.DATAFLOW)
    token = signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=60)
    head, _, last = token.rpartition(".")
    forms = {head + "." + last[:-1] + letter for letter in B64} - {token}
    forms |= {token + "=", token + "==", token + "\n", f"{token}.", token + "!", f" {token}"}
    forms |= {head + "." + last[:5] + extra + last[5:] for extra in ("!", "\n", " ", "=", "é")}
    forms |= {token.replace(".", "..", 1), token.upper(), token + ".x"}
    accepted = [form for form in forms if is_accepted(verifier.verify, form)]
    assert accepted == []
    verifier.verify(token)


def is_accepted(verify: Callable[[str], object], token: str) -> bool:
    try:
        verify(token)
    except (Unauthorized, Forbidden):
        return False
    return True


@pytest.mark.finding(12)
@pytest.mark.parametrize(
    "words",
    [
        ("join", "http://10.9.8.7:1"),
        ("join", "http://127.0.0.1.example.org:1"),
        ("join", "http://localhost@10.9.8.7:1"),
        ("relay", "http://10.9.8.7:1", "--public-key=x", "--cache=cache", "--port=18999"),
        ("gateway", "http://10.9.8.7:1", "--public-key=x", "--port=18999"),
    ],
)
def test_no_service_sends_its_token_in_clear_text(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: tuple[str, ...],
) -> None:
    """Proves that join, relay and gateway refuse http:// beyond this machine."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token").write_text("x")
    monkeypatch.setenv("PENSTOCK_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 1
    assert "clear text" in capsys.readouterr().err


# --- revocation ----------------------------------------------------------------------------------

RUN = "reverse"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was started once."""
    folder = RunFolder(tmp_path / "run")
    folder.write_config(demo_config(0))
    folder.allocate_endpoints(tmp_path, ())
    Signer.create(folder.keys, RUN)
    return folder


def verifier_of(folder: RunFolder, audience: Audience = Audience.DATAFLOW) -> Verifier:
    return Verifier.read(folder.keys, run=RUN, audience=audience)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services look for a new deny list at every call."""
    monkeypatch.setattr(denied, "CHECK_S", 0.0)


@contextmanager
def service_of(folder: RunFolder) -> Generator[str]:
    """A service that renews tokens, without routes of its own."""
    verifier = verifier_of(folder)
    verifier.renewer = Renewer(folder.keys)
    with serving(build_app([], verifier, title="test")) as url:
        yield url


def renewed(url: str, token: str) -> str:
    with closing(ServiceClient(url, token)) as client:
        return client.call("POST", RENEW_ROUTE, None, RenewedToken, deadline_s=10.0).token


@pytest.mark.finding(17)
@pytest.mark.parametrize("by", ["id", "name"])
def test_a_revoked_token_is_refused_everywhere_and_after_a_restart(
    folder: RunFolder, by: str
) -> None:
    """Proves that a running service that had accepted a token refuses it after its revocation, and
    so does one that starts later; other tokens stay valid."""
    token, credential = tokens.issue(folder, Role.ROLLOUT, name="laptop", ttl_s=60)
    other, _ = tokens.issue(folder, Role.ROLLOUT, name="desk", ttl_s=60)
    running = [verifier_of(folder), verifier_of(folder, Audience.WEIGHTS)]
    assert all(each.verify(token) and each.verify(other) for each in running)
    if by == "id":
        tokens.revoke(folder, id=credential.id)
    else:
        tokens.revoke(folder, name="laptop")
    for each in (*running, verifier_of(folder)):
        with pytest.raises(Unauthorized, match=r"revoked; get a new one with .penstock token RUN."):
            each.verify(token)
        each.verify(other)
    assert [live.subject for live in tokens.live_tokens(folder)] == ["desk"]


def test_a_renewal_made_before_the_revocation_is_refused_too(folder: RunFolder) -> None:
    """Proves that renewing a token does not wash off its id."""
    token, credential = tokens.issue(folder, Role.ROLLOUT, ttl_s=60, renew_s=7200)
    with service_of(folder) as url:
        later = renewed(url, token)
        assert later != token
        tokens.revoke(folder, id=credential.id)
        for each in (token, later):
            with pytest.raises(Unauthorized, match="revoked"):
                renewed(url, each)
        assert not is_accepted(verifier_of(folder).verify, later)


def test_a_revoked_name_is_never_issued_again(folder: RunFolder) -> None:
    """Proves that a revoked holder cannot be let in again by mistake under its old name."""
    tokens.issue(folder, Role.ROLLOUT, name="laptop", ttl_s=60)
    tokens.revoke(folder, name="laptop")
    with pytest.raises(ConfigError, match="choose another name"):
        tokens.issue(folder, Role.ROLLOUT, name="laptop", ttl_s=60)


@pytest.mark.parametrize("how", ["older list", "other run's list", "garbage", "truncated", "gone"])
def test_a_deny_list_cannot_be_set_back(folder: RunFolder, tmp_path: Path, how: str) -> None:
    """Proves that a running service keeps the newest list that the root key signed."""
    token, _ = tokens.issue(folder, Role.ROLLOUT, name="laptop", ttl_s=60)
    file = folder.keys / denied.FILE
    tokens.revoke(folder, name="someone")
    older = file.read_text()
    tokens.revoke(folder, name="laptop")
    verifier = verifier_of(folder)
    assert not is_accepted(verifier.verify, token)
    stranger = tmp_path / "other"
    keys.create_keys(stranger, RUN)
    denied.write_denied(stranger, Denied(serial=99))
    if how == "gone":
        file.unlink()
    else:
        content = {
            "older list": older,
            "other run's list": (stranger / denied.FILE).read_text(),
            "garbage": "nonsense",
            "truncated": file.read_text()[:20],
        }
        file.write_text(content[how])
    with pytest.raises(Unauthorized, match="revoked"):
        verifier.verify(token)


def test_a_deny_list_that_could_not_be_opened_is_read_again(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service without a free descriptor, for a moment, never looked at that list again."""
    monkeypatch.setattr(denied, "CHECK_S", 0.0)
    token, _ = tokens.issue(folder, Role.ROLLOUT, name="laptop", ttl_s=60)
    verifier = verifier_of(folder)
    assert is_accepted(verifier.verify, token)
    tokens.revoke(folder, name="laptop")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        assert is_accepted(verifier.verify, token)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not is_accepted(verifier.verify, token)


@pytest.mark.parametrize("content", ["nonsense", "", "e30.AAAA", "\ud83d"])
def test_a_service_does_not_start_with_a_damaged_deny_list(folder: RunFolder, content: str) -> None:
    """Proves that damage to the list fails closed, with the cure in the message."""
    (folder.keys / denied.FILE).write_bytes(content.encode(errors="surrogatepass"))
    with pytest.raises(ConfigError, match="is not a deny list of this run"):
        verifier_of(folder)


async def test_a_hostile_service_cannot_send_a_deny_list(folder: RunFolder, tmp_path: Path) -> None:
    """Proves that a remote verifier takes only lists that the root key signed, and keeps them over
    a restart, and that a hostile service cannot lift a revocation."""
    token, _ = tokens.issue(folder, Role.ROLLOUT, name="laptop", ttl_s=60)
    own, _ = tokens.issue(folder, Role.RELAY, name="relay", ttl_s=60)
    copy = tmp_path / "relay" / "denied"

    def start() -> Verifier:
        return Verifier.from_token(
            own, folder.public_key(), audience=Audience.WEIGHTS, denied_file=copy
        )

    async def nothing() -> None: ...

    relay = start()
    assert is_accepted(relay.verify, token)
    tokens.revoke(folder, name="laptop")
    weights = verifier_of(folder, Audience.WEIGHTS)
    with serving(build_app([], weights, title="weights")) as url:
        await with_upkeep(nothing(), held(own), urls=[url], denied=relay.denied)
    assert not is_accepted(relay.verify, token)
    forged = keys.sign(Ed25519PrivateKey.generate(), "penstock-denied1", b'{"serial":999}')
    for body in (forged, "nonsense", "", forged.replace(".", "")):
        head = f"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        with answering((head + body).encode()) as (url, _):
            await with_upkeep(nothing(), held(own), urls=[url], denied=relay.denied)
        assert not is_accepted(relay.verify, token)
    assert not is_accepted(start().verify, token)


def test_a_revoked_node_is_out_and_others_stay(tmp_path: Path) -> None:
    """Proves that a node is out as soon as its token is revoked, not when it falls silent, and that
    nodes of other names, also similar ones, stay."""
    with dataflow(tmp_path, small_config()) as running:

        async def register(name: str, subject: str) -> None:
            token = running.signer.mint(
                Role.ROLLOUT, [Audience.DATAFLOW], ttl_s=600, subject=subject
            )
            client = NodeClient(running.url, token)
            node = RegisterRequest(
                node_id=NodeId(name), boot_id="1", capacity=4, policies=(), tags=()
            )
            try:
                await client.register(node)
            finally:
                await client.close()

        for name, subject in {"good": "good", "thieves": "thieves"}.items():  # silent for longest
            asyncio.run(register(name, subject))
        for name in ("thief", "thief.2"):
            asyncio.run(register(name, "thief"))
        reader = running.reader()

        def nodes() -> set[str]:
            return {node.node_id for node in reader.status().nodes}

        assert nodes() == {"thief", "thief.2", "good", "thieves"}
        denied.write_denied(tmp_path / "keys", Denied(serial=1, subjects=frozenset({"thief"})))
        until(lambda: nodes() == {"good", "thieves"}, timeout_s=300.0, what="the thief is out")
        with pytest.raises(Unauthorized, match="revoked"):
            asyncio.run(register("thief", "thief"))


# --- clear text ----------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://10.0.0.5:18080", "http://weights.example", "HTTP://a.b:1"])
def test_no_client_sends_a_token_in_clear_text(url: str) -> None:
    """Also to an address that the run named: of its weights, or of a partition."""
    for make in (AsyncServiceClient, ServiceClient):
        with pytest.raises(ConfigError, match="the token would be sent in clear text"):
            make(url, "token")


async def test_a_partition_in_clear_text_is_not_named_to_nodes(tmp_path: Path) -> None:
    """Nodes and trainers would send their tokens there."""
    async with dataflow_door(tmp_path) as door:
        body = {"boot": {"epoch": 1, "boot_id": "s"}, "url": "http://10.0.0.5:7001"}
        answer = await door.call("PUT", "/v1/partitions/1", Role.ADMIN, body=body)
        assert answer.status_code == 400 and "in clear text" in answer.text
        body["url"] = "https://10.0.0.5:7001"
        assert (await door.call("PUT", "/v1/partitions/1", Role.ADMIN, body=body)).is_success


# --- rotation ------------------------------------------------------------------------------------


def test_rotation_replaces_the_key_without_an_error_for_anyone(folder: RunFolder) -> None:
    """Proves that old tokens stay valid and new ones are accepted at once, also by a verifier that
    has only the public key and hears nothing of the rotation."""
    old, _ = tokens.issue(folder, Role.ROLLOUT, ttl_s=60)
    local = verifier_of(folder)
    remote = Verifier.from_token(old, folder.public_key(), audience=Audience.DATAFLOW)
    stolen = keys.read_key(folder.keys, keys.SIGNING)
    tokens.rotate(folder)
    new, _ = tokens.issue(folder, Role.ROLLOUT, ttl_s=60)
    assert all(v.verify(t) for v in (local, remote) for t in (old, new))
    assert keys.read_key(folder.keys, keys.SIGNING).key_id != stolen.key_id
    with pytest.raises(Unauthorized, match="key that was replaced"):  # once its last token expired
        forged = signed_with(stolen, {"expires_at": time.time() + 1e6})
        local.verify(forged, now=time.time() + 5 * 3600)


def test_after_rotation_now_tokens_of_the_old_key_are_not_replayed(folder: RunFolder) -> None:
    """Proves that `rotate --now` ends every token of this and all earlier keys, renewed or not, and
    what a thief of the key signs later; the run's own services have new tokens before that."""
    path = folder.service_tokens / "node-0"
    write_token(folder, path, RUN, Role.ROLLOUT, subject="node-0")
    service = HeldToken.from_file(path)
    old, _ = tokens.issue(folder, Role.ROLLOUT, ttl_s=60, renew_s=7200)
    verifier = verifier_of(folder)
    tokens.rotate(folder)
    newer, credential = tokens.issue(folder, Role.ROLLOUT, ttl_s=60, renew_s=7200)
    before = (old, newer, Renewer(folder.keys).renew(newer, credential), service.value())
    stolen = keys.read_key(folder.keys, keys.SIGNING)
    stolen_renewal = keys.read_key(folder.keys, keys.RENEWAL)
    tokens.rotate(folder, now=True)
    fresh = signed_with(stolen, {})
    new, _ = tokens.issue(folder, Role.ROLLOUT, ttl_s=60, renew_s=7200)
    for token in (*before, fresh, renewed_with(stolen_renewal, new, int(time.time() + 600))):
        with pytest.raises(Unauthorized, match="key that was replaced"):
            verifier.verify(token)
    assert verifier.verify(service.reload()).subject == "node-0"
    verifier.verify(new)


@pytest.mark.parametrize("is_now", [False, True])
def test_a_rotation_that_fails_halfway_does_not_lose_the_stolen_key(
    folder: RunFolder, is_now: bool
) -> None:
    """Its disk was full, or the machine went down: the key is replaced, and what it signed is not
    refused yet. The next rotation refuses that key too, which no file has any more."""
    stolen = keys.read_key(folder.keys, keys.SIGNING)
    verifier = verifier_of(folder)
    obstacle = folder.service_tokens / "node-0"
    obstacle.mkdir(parents=True)  # where a token should be
    with pytest.raises(OSError):
        tokens.rotate(folder, now=True)
    assert keys.read_key(folder.keys, keys.SIGNING).key_id != stolen.key_id
    obstacle.rmdir()
    tokens.rotate(folder, now=is_now)
    forged = signed_with(stolen, {"expires_at": time.time() + 1e6})
    with pytest.raises(Unauthorized, match="key that was replaced"):
        verifier.verify(forged, now=time.time() + (1 if is_now else 5 * 3600))
    verifier.verify(tokens.issue(folder, Role.ROLLOUT, ttl_s=60)[0])


# --- forgery -------------------------------------------------------------------------------------


def signed_with(key: keys.CertifiedKey, fields: dict[str, object]) -> str:
    """A token with these fields, signed by a key that has a certificate."""
    body: dict[str, object] = {
        "run": RUN,
        "role": "admin",
        "audiences": ["dataflow"],
        "expires_at": time.time() + 60,
        "subject": "thief",
        "id": "0" * 16,
    }
    text = f"{PREFIX}.{key.certificate}.{b64encode(json.dumps(body | fields).encode())}"
    return f"{text}.{b64encode(key.private.sign(text.encode()))}"


def renewed_with(key: keys.CertifiedKey, token: str, until: int | str) -> str:
    text = f"{token}.{key.certificate}.{until}"
    return f"{text}.{b64encode(key.private.sign(text.encode()))}"


def test_a_key_without_the_root_keys_word_signs_nothing(folder: RunFolder, tmp_path: Path) -> None:
    """Proves that neither a certificate of another root key, nor one that certifies itself, nor a
    good certificate beside a signature of another key passes; nor the id of a good key."""
    verifier = verifier_of(folder)
    good = keys.read_key(folder.keys, keys.SIGNING)
    own = Ed25519PrivateKey.generate()
    body = keys.Certificate(run=RUN, use=KeyUse.TOKENS, public=keys.public_text(own.public_key()))
    self_signed = keys.sign(own, "penstock-key1", msgspec.json.encode(body))
    grafted = f"{b64encode(msgspec.json.encode(body))}.{good.certificate.partition('.')[2]}"
    keys.create_keys(tmp_path / "other", RUN)
    other = keys.read_key(tmp_path / "other", keys.SIGNING)
    forged = [
        keys.CertifiedKey(own, good.certificate),
        keys.CertifiedKey(own, self_signed),
        keys.CertifiedKey(own, grafted),
        keys.CertifiedKey(own, "."),
        other,
    ]
    assert is_accepted(verifier.verify, signed_with(good, {}))
    assert [is_accepted(verifier.verify, signed_with(key, {})) for key in forged] == [False] * 5


def test_the_renewal_key_makes_no_token(folder: RunFolder) -> None:
    """Proves that a compromised dataflow process, which holds the renewal key, cannot mint a token:
    not with its key's certificate, and not beside that of the signing key."""
    verifier = verifier_of(folder)
    renewal = keys.read_key(folder.keys, keys.RENEWAL)
    signing = keys.read_key(folder.keys, keys.SIGNING)
    assert not is_accepted(verifier.verify, signed_with(renewal, {}))
    both = keys.CertifiedKey(renewal.private, signing.certificate)
    assert not is_accepted(verifier.verify, signed_with(both, {}))


def test_a_renewal_extends_and_changes_nothing_else(folder: RunFolder) -> None:
    """Proves that a renewed token has the old subject, role, audiences, trust and id, and an expiry
    date within the bounds."""
    token, old = tokens.issue(
        folder, Role.ROLLOUT, name="x", ttl_s=60, renew_s=7200, is_trusted=False
    )
    with service_of(folder) as url:
        new = verifier_of(folder).verify(renewed(url, token))
        again = verifier_of(folder).verify(renewed(url, renewed(url, token)))
    assert old.expires_at < new.expires_at <= time.time() + RENEWED_TTL_S
    for found in (new, again):
        assert msgspec.structs.replace(found, expires_at=old.expires_at) == old
        assert found.expires_at <= old.renew_until


def test_even_the_renewal_key_extends_nothing_beyond_the_bounds_of_the_token(
    folder: RunFolder,
) -> None:
    """Proves that a compromised dataflow process cannot keep a token alive beyond what it was
    issued for, renew an admin's token, or write the date in a second form."""
    verifier, key = verifier_of(folder), keys.read_key(folder.keys, keys.RENEWAL)
    token, credential = tokens.issue(folder, Role.ROLLOUT, ttl_s=60, renew_s=7200)
    admin, _ = tokens.issue(folder, Role.ADMIN, ttl_s=60, renew_s=7200)
    soon = int(time.time() + 600)
    assert is_accepted(verifier.verify, renewed_with(key, token, soon))
    bad = [
        renewed_with(key, token, int(credential.renew_until) + 2),
        renewed_with(key, admin, soon),
        *(renewed_with(key, token, form) for form in (f"0{soon}", f"+{soon}", f"{soon}.0", "1e99")),
        renewed_with(key, token, f"{soon // 1000}_{soon % 1000:03}"),
        renewed_with(key, renewed_with(key, token, soon), soon + 1),
    ]
    assert [is_accepted(verifier.verify, each) for each in bad] == [False] * len(bad)


def test_a_renewal_cannot_be_moved_to_another_token(folder: RunFolder) -> None:
    """Proves that the later expiry date of one token gives no life to another."""
    verifier = verifier_of(folder)
    long, credential = tokens.issue(folder, Role.ROLLOUT, ttl_s=60, renew_s=7200)
    short, _ = tokens.issue(folder, Role.TRAINER, ttl_s=1e-3, renew_s=7200)
    extension = Renewer(folder.keys).renew(long, credential)[len(long) :]
    assert is_accepted(verifier.verify, long + extension)
    assert not is_accepted(verifier.verify, short + extension)


def test_what_cannot_be_renewed_is_refused_with_the_cure(folder: RunFolder) -> None:
    """Proves that admin tokens end when they say, and that an expired token is not brought back."""
    admin, _ = tokens.issue(folder, Role.ADMIN, ttl_s=60, renew_s=7200)
    ended, _ = tokens.issue(folder, Role.ROLLOUT, ttl_s=1e-3, renew_s=7200)
    with service_of(folder) as url:
        with pytest.raises(Forbidden, match="cannot be renewed; get a new one"):
            renewed(url, admin)
        with pytest.raises(Unauthorized, match="expired"):
            renewed(url, ended)


def test_algorithms_are_not_the_tokens_choice(folder: RunFolder) -> None:
    """Proves that no form of another system passes: JSON web tokens with `none`, or with the public
    key as a shared secret, and a MAC with the public key in place of our signature."""
    body = b64encode(json.dumps({"run": RUN, "role": "admin", "exp": time.time() + 60}).encode())
    secret = b64decode(folder.public_key())
    forged: list[str] = []
    for algorithm in ("none", "HS256", "EdDSA"):
        head = b64encode(json.dumps({"alg": algorithm, "typ": "JWT"}).encode())
        mac = hmac.new(secret, f"{head}.{body}".encode(), hashlib.sha256).digest()
        forged += [f"{head}.{body}.", f"{head}.{body}.{b64encode(mac)}"]
    good = folder.token(RUN, Role.ADMIN, ttl_s=60).rpartition(".")[0]
    forged += [
        f"{good}.{b64encode(hmac.new(secret, good.encode(), hashlib.sha512).digest())}",
        f"{good}.",
        good,
        f"{good}.{b64encode(bytes(64))}",
    ]
    verifier = verifier_of(folder)
    assert [is_accepted(verifier.verify, each) for each in forged] == [False] * len(forged)


@pytest.mark.parametrize(
    "fields",
    [
        {"is_admin": True},
        {"role": "root"},
        {"role": None},
        {"audiences": "dataflow"},
        {"expires_at": "never"},
        {"expires_at": None},
        {"is_trusted": 1},
        {"run": "another"},
        {"subject": 5},
    ],
)
def test_a_signed_body_with_other_fields_is_refused(
    folder: RunFolder, fields: dict[str, object]
) -> None:
    """Proves that a service never guesses: a field that it does not know may be a restriction."""
    key = keys.read_key(folder.keys, keys.SIGNING)
    assert is_accepted(verifier_of(folder).verify, signed_with(key, {}))
    assert not is_accepted(verifier_of(folder).verify, signed_with(key, fields))


def test_a_token_of_another_run_is_refused(folder: RunFolder, tmp_path: Path) -> None:
    """Proves that a run of the same name, and a service of another audience, accept nothing."""
    other = Signer.create(tmp_path / "other", RUN)
    token = other.mint(Role.ADMIN, list(Audience), ttl_s=60)
    with pytest.raises(Unauthorized, match="another run"):
        verifier_of(folder).verify(token)
    own = folder.token(RUN, Role.SESSION, ttl_s=60)
    for audience in (Audience.DATAFLOW, Audience.WEIGHTS, Audience.RELAY):
        assert not is_accepted(verifier_of(folder, audience).verify, own)


@pytest.mark.parametrize("letter", ["A", ".", "é", "\x00"])
def test_huge_tokens_cost_nothing(folder: RunFolder, letter: str) -> None:
    """Proves that size is checked before anything is decoded or any signature is verified, and that
    refused tokens are not remembered."""
    verifier = verifier_of(folder)
    calls = 200
    started = time.process_time()
    for index in range(calls):
        assert not is_accepted(verifier.verify, f"{PREFIX}.{index}" + letter * 1_000_000)
    assert time.process_time() - started < calls * 0.05
    assert not verifier._verified  # pyright: ignore[reportPrivateUsage]


# --- what leaves ---------------------------------------------------------------------------------


def test_a_redirect_does_not_carry_the_token_elsewhere() -> None:
    """Proves that a hostile service cannot send a client, with its token, to another address."""
    with answering(OK) as (thief, at_thief):
        moved = (
            f"HTTP/1.1 307 x\r\nconnection: close\r\ncontent-length: 0\r\nlocation: {thief}\r\n\r\n"
        )
        with answering(moved.encode()) as (url, seen), closing(ServiceClient(url, "t")) as client:
            with pytest.raises(PenstockError):
                client.call("GET", "/healthz", None, Health, deadline_s=0.2)
            assert seen
    assert at_thief == []


def test_a_refusal_is_repeated_once_and_only_with_another_token(tmp_path: Path) -> None:
    """Proves that a service that always answers 401 causes no loop, and that a client whose token
    file was replaced needs no restart."""
    body = b'{"error":{"code":"unauthorized","message":"no"}}'
    refused = (
        b"HTTP/1.1 401 x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    (tmp_path / "token").write_text("first")
    held_token = HeldToken.from_file(tmp_path / "token")
    with answering(refused) as (url, seen), closing(ServiceClient(url, held_token)) as client:
        with pytest.raises(PenstockError):
            client.call("GET", "/healthz", None, Health, deadline_s=5.0)
        assert len(seen) == 1
        (tmp_path / "token").write_text("second")
        with pytest.raises(PenstockError):
            client.call("GET", "/healthz", None, Health, deadline_s=5.0)
    sent = [next(line for line in each.split(b"\r\n") if b"uthoriz" in line) for each in seen]
    assert [line.split()[-1] for line in sent] == [b"first", b"first", b"second"]


COMMANDS_WITH_TOKENS = {
    "relay": ("http://127.0.0.1:1", "--public-key=x", "--cache=x", "--port=18999"),
    "gateway": ("http://127.0.0.1:1", "--public-key=x", "--port=18999"),
    "join": ("http://127.0.0.1:1",),
}


@pytest.mark.finding(17)
@pytest.mark.parametrize("command", COMMANDS_WITH_TOKENS)
def test_no_command_takes_a_token_as_an_argument_or_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Proves that a token cannot come to stand in a command line or in /proc/PID/environ."""
    monkeypatch.setenv("PENSTOCK_TOKEN", "CANARY")
    monkeypatch.delenv("PENSTOCK_TOKEN_FILE", raising=False)
    words = COMMANDS_WITH_TOKENS[command]
    with pytest.raises(SystemExit) as ended:
        main([command, *words, "--token", "CANARY"])
    assert ended.value.code and "--token" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main([command, *words])
    shown = capsys.readouterr()
    assert ended.value.code and "no token: pass --token-file FILE" in shown.err
    assert "CANARY" not in shown.err + shown.out


async def test_no_error_log_or_repr_shows_a_token(folder: RunFolder, tmp_path: Path) -> None:
    """Proves that a token that goes through every error path of client and verifier is in no
    message, log line or repr (C8)."""
    token, credential = tokens.issue(folder, Role.ROLLOUT, ttl_s=60)
    secrets_ = [part for part in token.split(".") if len(part) > 40][-2:]
    (tmp_path / "token").write_text(token)
    own = HeldToken.from_file(tmp_path / "token")
    shown = io.StringIO()
    handler = logging.StreamHandler(shown)
    logging.getLogger().addHandler(handler)
    messages = [repr(own), f"{own}", repr([own])]
    try:
        with structlog.testing.capture_logs() as logged:
            for url in ("http://127.0.0.1:9", "http://[::1]:9", "https://127.0.0.1:9"):
                client = AsyncServiceClient(url, own)
                with pytest.raises(PenstockError) as failed:
                    await client.request("GET", "/x", deadline_s=0.05, timeout_s=0.05)
                messages += [str(failed.value), repr(failed.value), repr(client)]
                await client.close()
            with service_of(folder) as url:
                for path in ("/nowhere", "/v1/status"):
                    with closing(ServiceClient(url, own)) as sync, pytest.raises(Exception) as no:
                        sync.call("GET", path, None, Health, deadline_s=0.2)
                    messages += [str(no.value), repr(no.value)]
            tokens.revoke(folder, id=credential.id)
            for bad in (token, token + "x", token[:-1], token.replace("penstock2", "penstock3")):
                with pytest.raises(Unauthorized) as refused:
                    verifier_of(folder).verify(bad)
                messages.append(str(refused.value))
            await with_upkeep(asyncio.sleep(0.2), own, urls=["http://127.0.0.1:9"])
    finally:
        logging.getLogger().removeHandler(handler)
    everything = "\n".join([*messages, repr(logged), shown.getvalue()])
    assert not [part for part in secrets_ if part in everything]
    for file in (folder.keys / "issued.jsonl", folder.keys / denied.FILE):
        assert not [part for part in secrets_ if part in file.read_text()]


def test_secrets_on_disk_are_for_their_owner_only(
    folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Proves that keys and tokens are private from the first moment, whatever the umask, and that a
    planted link does not redirect them."""
    before = os.umask(0)
    try:
        keys.create_keys(tmp_path / "keys", "run")
        victim, out = tmp_path / "victim", tmp_path / "token"
        victim.write_text("before")
        (tmp_path / "token.partial").symlink_to(victim)
        out.symlink_to(victim)
        with pytest.raises(SystemExit) as ended:
            main(["token", str(folder.path), "--out", str(out)])
        assert ended.value.code == 0
    finally:
        os.umask(before)
    assert victim.read_text() == "before" and not out.is_symlink()
    private = [out, *(path for path in (tmp_path / "keys").iterdir() if path.name != "public.key")]
    assert len(private) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    shown = capsys.readouterr()
    assert out.read_text().strip() not in shown.out + shown.err


@pytest.mark.parametrize("role", [role for role in Role if role is not Role.ROLLOUT])
def test_an_untrusted_token_has_no_role_that_is_believed(folder: RunFolder, role: Role) -> None:
    """A stage writes rewards and accuses nodes, a gateway rewards: no service checks them again."""
    with pytest.raises(ConfigError, match="rollout"):
        tokens.issue(folder, role, name="alice", ttl_s=60.0, is_trusted=False)
    assert tokens.issued_tokens(folder) == []


@pytest.mark.parametrize(
    "name", ["a.b", "../x", "", "a/b", "ä", "x" * 65, "a b", "a\n", "-\x00", "node-0."]
)
def test_a_name_cannot_stand_for_more_than_one_holder(folder: RunFolder, name: str) -> None:
    """Proves that a subject is a plain name: no dot that would reach into another's node ids, no
    path, no look-alike."""
    with pytest.raises(ConfigError, match="must be 1 to 64 letters"):
        tokens.issue(folder, Role.ROLLOUT, name=name, ttl_s=60)


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"a\nb", b"\x00" * 10])
def test_a_token_file_holds_one_token_or_is_refused(tmp_path: Path, content: bytes) -> None:
    """Proves that no line of a token file can become a header of its own."""
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="does not contain one token"):
        HeldToken.from_file(path)


def test_the_clock_of_the_holder_decides_nothing(folder: RunFolder) -> None:
    """Proves that what a token says of itself, unverified, is only for its holder: a body with a
    later date does not verify."""
    token = folder.token(RUN, Role.ROLLOUT, ttl_s=-1)
    parts = token.split(".")
    told = read_unverified(token)
    assert told is not None
    later = msgspec.structs.replace(told, expires_at=time.time() + 1e6)
    parts[3] = b64encode(msgspec.json.encode(later))
    forged = ".".join(parts)
    assert (read_unverified(forged) or told).expires_at == later.expires_at
    assert not is_accepted(verifier_of(folder).verify, forged)
    assert isinstance(later, Credential)


def test_a_deny_list_passes_for_nothing_else(folder: RunFolder) -> None:
    """Proves that what the root key signed as one kind is not accepted as another."""
    tokens.revoke(folder, name="laptop")
    root = keys.read_public(folder.keys)
    signed = (folder.keys / denied.FILE).read_text().strip()
    certificate = keys.read_key(folder.keys, keys.SIGNING).certificate
    with pytest.raises(ValueError, match="signature"):
        keys.check_certificate(root, signed)
    with pytest.raises(ValueError, match="signature"):
        DenyList(root, None).install(certificate)


def test_renewals_of_one_holder_do_not_crowd_out_other_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each renewal is another text that the verifier remembers; a check of one that it does not
    remember costs a hundred times as much."""
    monkeypatch.setattr(auth, "_MAX_KNOWN", 8)
    signer = Signer.create(tmp_path, "run")
    verifier, renewer = signer.verifier(Audience.DATAFLOW), Renewer(tmp_path)

    def mint(subject: str) -> str:
        audiences = [Audience.DATAFLOW]
        return signer.mint(Role.READER, audiences, ttl_s=60, subject=subject, renew_s=1e6)

    greedy, victim = mint("greedy"), mint("victim")
    checked: list[str] = []
    check = Verifier._check  # pyright: ignore[reportPrivateUsage]

    def count(self: Verifier, token: str) -> object:
        checked.append(token)
        return check(self, token)

    monkeypatch.setattr(Verifier, "_check", count)
    for number in range(30):
        monkeypatch.setattr(auth, "RENEWED_TTL_S", 3600.0 + number)
        verifier.verify(renewer.renew(greedy, verifier.verify(greedy)))
    for _ in range(3):
        verifier.verify(victim)
    assert checked.count(victim) == 1, "it is remembered although the other came first"
    for number in range(30):
        monkeypatch.setattr(auth, "RENEWED_TTL_S", 7200.0 + number)
        verifier.verify(renewer.renew(greedy, verifier.verify(greedy)))
    verifier.verify(victim)
    assert checked.count(victim) == 1, "and stays so"


class Clock:
    """Time of a test, in place of the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize("num_before", [1, 2, 3, 4])
async def test_a_revoked_node_gets_at_most_one_more_heartbeat(
    num_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, in the node's own rhythm, whenever the service last looked for a revocation."""
    clock = Clock()
    monkeypatch.setattr(denied, "time", clock)
    monkeypatch.setattr(denied, "CHECK_S", CHECK_S)
    async with dataflow_door(tmp_path, small_config()) as door:
        headers = {"authorization": f"Bearer {door.token(Role.ROLLOUT, 'thief')}"}
        body = {"node_id": "thief", "boot_id": "b", "capacity": 1, "policies": list[str]()}
        joined = (await door.http.post("/v1/nodes", headers=headers, json=body)).json()
        beat = {"boot_id": "b", "state": "live", "live": list[str](), "secret": joined["secret"]}

        async def status() -> int:
            clock.now += joined["heartbeat_s"]
            answer = await door.http.put("/v1/nodes/thief", headers=headers, json=beat)
            return answer.status_code

        assert [await status() for _ in range(num_before)] == [200] * num_before
        revoked = Denied(serial=1, subjects=frozenset({"thief"}))
        denied.write_denied(tmp_path / "keys", revoked)
        after = [await status() for _ in range(6)]
    assert after.count(200) <= 1 and after[1:] == [401] * 5


def test_a_reader_who_asks_for_a_policy_is_no_sign_of_life_of_its_trainer(tmp_path: Path) -> None:
    """A dashboard that asked every second kept a dead trainer alive: `status` blamed the nodes."""
    service = build(small_config(), tmp_path)
    try:
        assert service.trainers.policy_state("policy").number == 0
        assert not service.trainers.seen
    finally:
        service.close()
