# SPDX-License-Identifier: Apache-2.0
"""Ed25519-signed, expiring tokens with a role and audiences.

Verifiers hold only the public key, and a token is only valid at the services named in its
audiences. Owns key files and tokens; knows nothing about routes.
"""

from __future__ import annotations

import base64
import os
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from penstock.errors import ConfigError, Forbidden, Unauthorized

PREFIX = "penstock1"
MAX_TOKEN_CHARS = 4096
EXPIRED = (
    "token has expired; get a new one with `penstock token RUN` on the host that has the run "
    "folder, then start this again"
)


class Role(StrEnum):
    ADMIN = "admin"
    TRAINER = "trainer"
    ROLLOUT = "rollout"
    STAGE = "stage"
    GATEWAY = "gateway"
    SESSION = "session"
    RELAY = "relay"
    READER = "reader"
    PARTITION = "partition"
    """A data partition that calls the coordinator."""


class Audience(StrEnum):
    DATAFLOW = "dataflow"
    WEIGHTS = "weights"
    """The run's weight server."""
    RELAY = "relay"
    """Weight relays, on machines that the run need not trust."""
    GATEWAY = "gateway"
    """A gateway that serves external agents."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credential:
    """The caller's identity, from its signed token."""

    run: str
    role: Role
    audiences: tuple[str, ...]
    expires_at: float
    subject: str = ""
    """Who it is for: a node, a stage, a relay, the owner of an agent, an operator. Quotas, rate
    limits, quarantine and audit are per subject."""
    id: str = ""
    """Drawn at random for each token; revocation names it."""
    is_trusted: bool = True
    """False: what its holder reports is checked again on the trusted side."""


def _b64encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _b64decode(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


def expires_at(token: str) -> float | None:
    """When a token expires, by its own account; None if it is not a penstock token. Checks no
    signature: for the holder of the token, not for a service."""
    prefix, _, rest = token.partition(".")
    try:
        body = _b64decode(rest.partition(".")[0])
        return msgspec.json.decode(body, type=Credential).expires_at if prefix == PREFIX else None
    except (ValueError, msgspec.MsgspecError):
        return None


def subject_of(token: str) -> str:
    """Who a token is for, by its own account; empty if it does not say. Checks no signature: for
    the holder of the token, not for a service."""
    prefix, _, rest = token.partition(".")
    try:
        body = _b64decode(rest.partition(".")[0])
        return msgspec.json.decode(body, type=Credential).subject if prefix == PREFIX else ""
    except (ValueError, msgspec.MsgspecError):
        return ""


class Signer:
    """Mints tokens; needs the signing key file."""

    def __init__(self, key: Ed25519PrivateKey, run: str) -> None:
        self._key = key
        self.run = run

    @classmethod
    def create(cls, folder: Path, run: str) -> Signer:
        """Create the run's keys, `signing.key` (0600) and `public.key`, or read existing ones."""
        folder.mkdir(parents=True, exist_ok=True)
        private = folder / "signing.key"
        if not private.exists():
            key = Ed25519PrivateKey.generate()
            raw = key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
            public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
            (folder / "public.key").write_text(_b64encode(public) + "\n")
            partial = folder / "signing.key.partial"
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as out:
                out.write(_b64encode(raw) + "\n")
            partial.rename(private)
        return cls.read(folder, run)

    @classmethod
    def read(cls, folder: Path, run: str) -> Signer:
        try:
            raw = _b64decode((folder / "signing.key").read_text().strip())
        except OSError as error:
            raise ConfigError(
                f"no signing key in {folder}: {error.strerror}; "
                "mint tokens on the machine where the run was started"
            ) from None
        return cls(Ed25519PrivateKey.from_private_bytes(raw), run)

    def mint(
        self,
        role: Role,
        audiences: Iterable[Audience],
        *,
        ttl_s: float,
        subject: str = "",
        is_trusted: bool = True,
    ) -> str:
        credential = Credential(
            run=self.run,
            role=role,
            audiences=tuple(audiences),
            expires_at=time.time() + ttl_s,
            subject=subject,
            id=secrets.token_hex(8),
            is_trusted=is_trusted,
        )
        body = _b64encode(msgspec.json.encode(credential))
        return f"{PREFIX}.{body}.{_b64encode(self._key.sign(body.encode()))}"

    def verifier(self, audience: Audience) -> Verifier:
        return Verifier(self._key.public_key(), run=self.run, audience=audience)


class Verifier:
    """Checks tokens for one service of one run."""

    def __init__(self, key: Ed25519PublicKey, *, run: str, audience: Audience) -> None:
        self._key = key
        self.run = run
        self._audience = audience
        self._verified: dict[str, Credential] = {}

    @classmethod
    def read(cls, folder: Path, *, run: str, audience: Audience) -> Verifier:
        raw = _b64decode((folder / "public.key").read_text().strip())
        return cls(Ed25519PublicKey.from_public_bytes(raw), run=run, audience=audience)

    @classmethod
    def from_token(cls, token: str, public_key: str, *, audience: Audience) -> Verifier:
        """For processes without the run folder: needs only the run's public key and a token; the
        run's name comes from the token."""
        try:
            key = Ed25519PublicKey.from_public_bytes(_b64decode(public_key.strip()))
        except ValueError:
            raise ConfigError(
                f"{public_key[:80]!r} is not a run's public key; use the line in keys/public.key "
                "of the run folder, which `penstock token RUN --role relay` also prints"
            ) from None
        verifier = cls(key, run="", audience=audience)
        credential = verifier._check_signature(token)
        if credential.expires_at <= time.time():
            raise Unauthorized(EXPIRED)
        verifier.run = credential.run
        return verifier

    def verify(self, token: str, *, now: float | None = None) -> Credential:
        """Return the credential, or raise Unauthorized (invalid token) or Forbidden (valid, but for
        another run or service)."""
        credential = self._verified.get(token) or self._check_signature(token)
        if credential.expires_at <= (time.time() if now is None else now):
            self._verified.pop(token, None)
            raise Unauthorized(EXPIRED)
        if credential.run != self.run:
            raise Forbidden(f"token belongs to run {credential.run!r}, this is {self.run!r}")
        if self._audience not in credential.audiences:
            raise Forbidden(f"token is not for the {self._audience} service")
        if len(self._verified) < 4096:  # a signature check costs 100 µs, and there are few tokens
            self._verified[token] = credential
        return credential

    def _check_signature(self, token: str) -> Credential:
        if not token:
            raise Unauthorized("no credential; send `Authorization: Bearer TOKEN`")
        prefix, _, rest = token.partition(".")
        body, _, signature = rest.partition(".")
        if prefix != PREFIX or len(token) > MAX_TOKEN_CHARS:
            raise Unauthorized("this is not a penstock token; mint one with `penstock token RUN`")
        try:
            self._key.verify(_b64decode(signature), body.encode())
            return msgspec.json.decode(_b64decode(body), type=Credential)
        except (InvalidSignature, ValueError, msgspec.MsgspecError):
            raise Unauthorized(
                "token signature does not match this run's key; it was minted for another run"
            ) from None
