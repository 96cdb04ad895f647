# SPDX-License-Identifier: Apache-2.0
"""Signed, expiring tokens with a subject, a role and audiences.

    token            penstock2.CERTIFICATE.BODY.SIGNATURE
    renewed token    TOKEN.CERTIFICATE.EXPIRES_AT.SIGNATURE

CERTIFICATE is the root key's word for the key that made the signature. A renewal adds a later
expiry date and can change nothing else. Verifiers hold only the root key's public half, and a token
is only valid at the services named in its audiences. Owns tokens; knows nothing about routes.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from penstock.durable import FolderId
from penstock.errors import ConfigError, Forbidden, Unauthorized
from penstock.wire import keys
from penstock.wire.denied import FILE, Denied, DenyList
from penstock.wire.keys import Certificate, CertifiedKey, KeyUse, b64decode

PREFIX = "penstock2"
MAX_TOKEN_CHARS = 4096
RENEWED_TTL_S = 3600.0
"""How long a renewed token is valid."""
NEW_TOKEN = "get a new one with `penstock token RUN` on the host that has the run folder"
EXPIRED = f"token has expired; {NEW_TOKEN}, then start this again"
NOT_SIGNED = "token signature does not match this run's key; it was minted for another run"
_TOKEN_PARTS, _RENEWED_PARTS = 5, 9
_MAX_KNOWN = 4096
_MAX_KNOWN_PER_ID = 4
"""Each renewal is another text: without a limit, one holder would crowd out the others."""
_MAX_CERTIFICATES = 64


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
    DASHBOARD = "dashboard"
    """One dashboard, which has its own key."""
    TINKER = "tinker"
    """One Tinker server, which has its own keys."""


class Credential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The caller's identity, from its signed token."""

    run: str
    role: Role
    audiences: tuple[str, ...]
    expires_at: float
    subject: str = ""
    """Who it is for: a node, a stage, a relay, the owner of an agent, an operator. Quotas, rate
    limits, quarantine and audit are per subject."""
    id: str = ""
    """Drawn at random for each token, and kept when it is renewed; revocation names it."""
    is_trusted: bool = True
    """False: what its holder reports is checked again on the trusted side."""
    renew_until: float = 0.0
    """Renewals cannot extend it beyond this time; 0: it cannot be renewed."""


class _Known(NamedTuple):
    credential: Credential
    key_ids: tuple[str, ...]
    """The keys that signed the token and its renewal."""


def read_unverified(token: str) -> Credential | None:
    """What a token says; None if it is not a penstock token. Checks no signature: for the holder of
    the token, not for a service."""
    parts = token.split(".")
    if parts[0] != PREFIX or len(parts) not in (_TOKEN_PARTS, _RENEWED_PARTS):
        return None
    try:
        credential = msgspec.json.decode(b64decode(parts[3]), type=Credential)
        return credential if len(parts) == _TOKEN_PARTS else _renewed(credential, parts[7])
    except (ValueError, msgspec.MsgspecError, RecursionError):
        return None


def subject_of(token: str) -> str:
    """Who a token is for, by its own account; empty if it does not say."""
    credential = read_unverified(token)
    return "" if credential is None else credential.subject


def expires_at(token: str) -> float | None:
    """When a token expires, by its own account; None if it is not a penstock token."""
    credential = read_unverified(token)
    return None if credential is None else credential.expires_at


def _renewed(credential: Credential, expires: str) -> Credential:
    """Raises ValueError."""
    until = int(expires)
    if str(until) != expires or until > credential.renew_until:
        raise ValueError("the renewal is not within the limits of the token")
    return msgspec.structs.replace(credential, expires_at=float(until))


class Signer:
    """Mints tokens; needs the signing key file."""

    def __init__(self, folder: Path, run: str, *, within: FolderId | None = None) -> None:
        self._folder = folder
        self._key = keys.read_key(folder, keys.SIGNING, within=within)
        self.run = run

    @classmethod
    def create(cls, folder: Path, run: str) -> Signer:
        """Create the run's keys, or read existing ones."""
        keys.create_keys(folder, run)
        return cls(folder, run)

    @classmethod
    def read(cls, folder: Path, run: str, *, within: FolderId | None = None) -> Signer:
        """`within`: the run folder that the keys must be in."""
        return cls(folder, run, within=within)

    @property
    def key_id(self) -> str:
        return self._key.key_id

    def mint(
        self,
        role: Role,
        audiences: Iterable[Audience],
        *,
        ttl_s: float,
        subject: str = "",
        is_trusted: bool = True,
        renew_s: float = 0.0,
    ) -> str:
        """`renew_s`: for how long from now its holder may renew it."""
        now = time.time()
        credential = Credential(
            run=self.run,
            role=role,
            audiences=tuple(audiences),
            expires_at=now + ttl_s,
            subject=subject,
            id=secrets.token_hex(8),
            is_trusted=is_trusted,
            renew_until=now + renew_s if renew_s else 0.0,
        )
        body = keys.b64encode(msgspec.json.encode(credential))
        return _sign(self._key, f"{PREFIX}.{self._key.certificate}.{body}")

    def verifier(self, audience: Audience) -> Verifier:
        return Verifier.read(self._folder, run=self.run, audience=audience)


class Renewer:
    """Extends tokens; cannot make one. Services beside the run folder hold its key."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def renew(self, token: str, credential: Credential) -> str:
        """The same token with a later expiry date, or as it is if that would be no later. Pass only
        a token that was verified just now."""
        if not credential.renew_until:
            raise Forbidden(f"this token cannot be renewed; {NEW_TOKEN}")
        until = int(min(time.time() + RENEWED_TTL_S, credential.renew_until))
        if until <= credential.expires_at:
            return token
        key = keys.read_key(self._folder, keys.RENEWAL)  # it may have been replaced
        original = ".".join(token.split(".")[:_TOKEN_PARTS])
        return _sign(key, f"{original}.{key.certificate}.{until}")


def _sign(key: CertifiedKey, text: str) -> str:
    return f"{text}.{keys.b64encode(key.private.sign(text.encode()))}"


def _is_replaced(known: _Known, denied: Denied, at: float) -> bool:
    """Whether a key that signed it is refused at this time."""
    return bool(denied.keys) and any(denied.keys.get(key, at + 1) <= at for key in known.key_ids)


class Verifier:
    """Checks tokens for one service of one run."""

    def __init__(
        self, root: Ed25519PublicKey, *, run: str, audience: Audience, denied: DenyList
    ) -> None:
        self._root = root
        self.run = run
        self._audience = audience
        self.denied = denied
        self.renewer: Renewer | None = None
        """Set where the service also renews tokens."""
        self._denied_now = denied.current()
        self._verified: dict[str, _Known] = {}
        """The longest known first; also the next."""
        self._by_id: dict[str, list[str]] = {}
        self._certificates: dict[str, Certificate] = {}

    @classmethod
    def read(cls, folder: Path, *, run: str, audience: Audience) -> Verifier:
        root = keys.read_public(folder)
        return cls(root, run=run, audience=audience, denied=DenyList(root, folder / FILE))

    @classmethod
    def from_token(
        cls, token: str, public_key: str, *, audience: Audience, denied_file: Path | None = None
    ) -> Verifier:
        """For processes without the run folder: needs only the run's public key and a token; the
        run's name comes from the token.

        denied_file: where to keep the run's deny list."""
        try:
            root = keys.parse_public_key(public_key.strip())
        except ValueError:
            raise ConfigError(
                f"{public_key[:80]!r} is not a run's public key; use the line in keys/public.key "
                "of the run folder, which `penstock token RUN --role relay` also prints"
            ) from None
        verifier = cls(root, run="", audience=audience, denied=DenyList(root, denied_file))
        credential = verifier._check(token).credential
        if credential.expires_at <= time.time():
            raise Unauthorized(EXPIRED)
        verifier.run = credential.run
        return verifier

    def verify(self, token: str, *, now: float | None = None) -> Credential:
        """Return the credential, or raise Unauthorized (invalid or revoked token) or Forbidden
        (valid, but for another run or service)."""
        if (denied := self.denied.current()) is not self._denied_now:
            self._denied_now = denied
            self._verified.clear()
            self._by_id.clear()
        known = self._verified.get(token) or self._check(token)
        at, credential = time.time() if now is None else now, known.credential
        if credential.expires_at <= at:
            self._forget(token)
            raise Unauthorized(EXPIRED)
        if _is_replaced(known, denied, at):
            raise Unauthorized(f"token is signed by a key that was replaced; {NEW_TOKEN}")
        if credential.run != self.run:
            raise Forbidden(f"token belongs to run {credential.run!r}, this is {self.run!r}")
        if self._audience not in credential.audiences:
            raise Forbidden(f"token is not for the {self._audience} service")
        if token not in self._verified:
            self._remember(token, known)
        return credential

    def _remember(self, token: str, known: _Known) -> None:
        """A check costs 200 µs, and there are few tokens."""
        same = self._by_id.setdefault(known.credential.id, [])
        if len(same) >= _MAX_KNOWN_PER_ID:
            self._forget(same[0])
        elif len(self._verified) >= _MAX_KNOWN:
            self._forget(next(iter(self._verified)))
        self._verified[token] = known
        self._by_id.setdefault(known.credential.id, []).append(token)

    def _forget(self, token: str) -> None:
        known = self._verified.pop(token, None)
        if known is None:
            return
        same = self._by_id[known.credential.id]
        same.remove(token)
        if not same:
            del self._by_id[known.credential.id]

    def watch(self, token: str) -> Callable[[], bool]:
        """For what outlives a valid token: says whether it has been revoked since, or its key
        replaced; not whether it has expired."""
        known = self._verified.get(token) or self._check(token)
        id, subject = known.credential.id, known.credential.subject

        def is_denied() -> bool:
            denied = self.denied.current()
            is_revoked = id in denied.tokens or subject in denied.subjects
            return is_revoked or _is_replaced(known, denied, time.time())

        return is_denied

    def _check(self, token: str) -> _Known:
        """Everything but what changes with time."""
        if not token:
            raise Unauthorized("no credential; send `Authorization: Bearer TOKEN`")
        parts = token[: MAX_TOKEN_CHARS + 1].split(".")
        if (
            parts[0] != PREFIX
            or len(token) > MAX_TOKEN_CHARS
            or len(parts) not in (_TOKEN_PARTS, _RENEWED_PARTS)
        ):
            raise Unauthorized("this is not a penstock token; mint one with `penstock token RUN`")
        try:
            known = self._check_signatures(parts)
        except (ValueError, msgspec.MsgspecError):
            raise Unauthorized(NOT_SIGNED) from None
        credential = known.credential
        if credential.id in self._denied_now.tokens:
            raise Unauthorized(f"token {credential.id} was revoked; {NEW_TOKEN}")
        if credential.subject in self._denied_now.subjects:
            raise Unauthorized(
                f"tokens of {credential.subject!r} were revoked; {NEW_TOKEN}, under another name"
            )
        return known

    def _check_signatures(self, parts: list[str]) -> _Known:
        """Raises ValueError."""
        certificate = self._check_part(parts[:_TOKEN_PARTS], KeyUse.TOKENS)
        credential = msgspec.json.decode(b64decode(parts[3]), type=Credential)
        if certificate.run != credential.run:
            raise ValueError("the key is of another run")
        if len(parts) == _TOKEN_PARTS:
            return _Known(credential, (certificate.key_id,))
        renewal = self._check_part(parts, KeyUse.RENEWALS)
        if renewal.run != credential.run:
            raise ValueError("the renewal key is of another run")
        return _Known(_renewed(credential, parts[7]), (certificate.key_id, renewal.key_id))

    def _check_part(self, parts: list[str], use: KeyUse) -> Certificate:
        """The last four parts: certificate, its signature, content, signature over all before."""
        signed = ".".join(parts[-4:-2])
        certificate = self._certificates.get(signed) or keys.check_certificate(self._root, signed)
        if len(self._certificates) < _MAX_CERTIFICATES:
            self._certificates[signed] = certificate
        if certificate.use != use:
            raise ValueError(f"this key may not sign {use}")
        keys.check_signature(certificate.key(), ".".join(parts[:-1]), parts[-1])
        return certificate
