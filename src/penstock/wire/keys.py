# SPDX-License-Identifier: Apache-2.0
"""The keys of a run: a root key, and the keys that it certifies to sign tokens or renewals.

    root.key ──certifies──► signing.key ──signs──► tokens
       │    └──certifies──► renewal.key ──signs──► later expiry dates of tokens
       └────signs─────────► denied: tokens, names and keys that are no longer accepted

Every token carries the certificate of its key, so a verifier needs the public half of the root key
and nothing else to accept the tokens of a new signing key. Owns the files in `keys/` and signed
text; knows nothing about tokens.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from penstock.durable import FolderId, read_own, sync
from penstock.errors import ConfigError

ROOT, SIGNING, RENEWAL, PUBLIC = "root.key", "signing.key", "renewal.key", "public.key"
_CERTIFICATE = "penstock-key1"
_MAX_BYTES = 1 << 16


class KeyUse(StrEnum):
    TOKENS = "tokens"
    RENEWALS = "renewals"


class Certificate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The root key's word for another key."""

    run: str
    use: KeyUse
    public: str

    @property
    def key_id(self) -> str:
        return blake3(self.public.encode()).hexdigest()[:16]

    def key(self) -> Ed25519PublicKey:
        return parse_public_key(self.public)


@dataclass(frozen=True, slots=True)
class CertifiedKey:
    """A private key, and the root key's word for it as text: `BODY.SIGNATURE`."""

    private: Ed25519PrivateKey
    certificate: str

    @property
    def key_id(self) -> str:
        return certificate_of(self.certificate).key_id


# --- text ----------------------------------------------------------------------------------------


def b64encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def b64decode(text: str) -> bytes:
    """Strict: ValueError for anything but the one canonical form."""
    data = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    if b64encode(data) != text:
        raise ValueError("not canonical base64")
    return data


def parse_public_key(text: str) -> Ed25519PublicKey:
    """Raises ValueError."""
    return Ed25519PublicKey.from_public_bytes(b64decode(text))


def public_text(key: Ed25519PublicKey) -> str:
    return b64encode(key.public_bytes(Encoding.Raw, PublicFormat.Raw))


def sign(key: Ed25519PrivateKey, kind: str, body: bytes) -> str:
    """`BODY.SIGNATURE`; the signature also covers `kind`, so one kind cannot pass as another."""
    text = b64encode(body)
    return f"{text}.{b64encode(key.sign(f'{kind}.{text}'.encode()))}"


def check_signed(key: Ed25519PublicKey, kind: str, signed: str) -> bytes:
    """The body of signed text. Raises ValueError."""
    text, _, signature = signed.partition(".")
    check_signature(key, f"{kind}.{text}", signature)
    return b64decode(text)


def check_signature(key: Ed25519PublicKey, text: str, signature: str) -> None:
    """Raises ValueError."""
    try:
        key.verify(b64decode(signature), text.encode())
    except InvalidSignature:
        raise ValueError("the signature does not match") from None


def certificate_of(signed: str) -> Certificate:
    """By its own account, without a check. Raises ValueError."""
    return msgspec.json.decode(b64decode(signed.partition(".")[0]), type=Certificate)


def check_certificate(root: Ed25519PublicKey, signed: str) -> Certificate:
    """Raises ValueError."""
    return msgspec.json.decode(check_signed(root, _CERTIFICATE, signed), type=Certificate)


# --- files ---------------------------------------------------------------------------------------


def create_keys(folder: Path, run: str) -> None:
    """Create the run's keys; existing ones stay."""
    make_private_folder(folder)
    if not (folder / ROOT).exists():
        root = Ed25519PrivateKey.generate()
        (folder / SIGNING).unlink(missing_ok=True)  # of another root key
        (folder / RENEWAL).unlink(missing_ok=True)
        (folder / PUBLIC).write_text(public_text(root.public_key()) + "\n")
        write_secret(folder / ROOT, _private_text(root))
    for name, use in ((SIGNING, KeyUse.TOKENS), (RENEWAL, KeyUse.RENEWALS)):
        if not (folder / name).exists():
            replace_key(folder, run, name, use)


def replace_key(folder: Path, run: str, name: str, use: KeyUse) -> CertifiedKey:
    """A new key of this use, certified by the root key; the old one is gone."""
    key = Ed25519PrivateKey.generate()
    body = Certificate(run=run, use=use, public=public_text(key.public_key()))
    certificate = sign(read_root(folder), _CERTIFICATE, msgspec.json.encode(body))
    write_secret(folder / name, f"{_private_text(key)}\n{certificate}")
    return CertifiedKey(key, certificate)


def read_root(folder: Path) -> Ed25519PrivateKey:
    return _parse_private(_read_lines(folder / ROOT)[0])


def read_key(folder: Path, name: str, *, within: FolderId | None = None) -> CertifiedKey:
    private, certificate = _read_lines(folder / name, within)
    return CertifiedKey(_parse_private(private), certificate)


def read_public(folder: Path) -> Ed25519PublicKey:
    return parse_public_key(_read_lines(folder / PUBLIC)[0])


def make_private_folder(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def write_secret(path: Path, text: str) -> None:
    """A file that only its owner can read, at no moment otherwise; on disk when this returns."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(text + "\n")
        out.flush()
        os.fsync(descriptor)
    partial.rename(path)
    sync(path.parent)


def _read_lines(path: Path, within: FolderId | None = None) -> list[str]:
    try:
        return read_own(path, _MAX_BYTES, within=within).decode().split()
    except OSError as error:
        raise ConfigError(
            f"no key {path.name} in {path.parent}: {error.strerror}; create, revoke and rotate "
            "tokens on the machine where the run was started, as the user who started it"
        ) from None


def _private_text(key: Ed25519PrivateKey) -> str:
    return b64encode(key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption()))


def _parse_private(text: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(b64decode(text))
