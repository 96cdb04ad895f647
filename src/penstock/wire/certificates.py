# SPDX-License-Identifier: Apache-2.0
"""A private certificate authority for one run, so that its services speak TLS beyond loopback.

Owns the files: `ca.pem` to give to every host, `ca.key` that stays where it was made, and a
certificate with its key for each service host or client.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from penstock.errors import ConfigError
from penstock.wire.serving import Tls

AUTHORITY_DAYS = 3650
SKEW = datetime.timedelta(hours=1)
"""Certificates are valid from before now: the clocks of other hosts may be behind."""


@dataclass(frozen=True, slots=True)
class Authority:
    """Signs certificates; needs its folder with `ca.pem` and `ca.key`."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """What every host needs in order to trust the run's services."""
        return self.folder / "ca.pem"

    @classmethod
    def create(cls, folder: Path) -> Authority:
        """Make an authority, or read an existing one."""
        authority = cls(folder)
        if authority.certificate.exists():
            return authority
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        name = _name("penstock private CA")
        made = (
            _builder(name, name, key.public_key(), AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True)
            .sign(key, SHA256())
        )
        _write_key(folder / "ca.key", key)
        authority.certificate.write_bytes(made.public_bytes(Encoding.PEM))
        return authority

    def issue(self, name: str, hosts: Sequence[str], *, days: float) -> Tls:
        """Make NAME.pem and NAME.key for a server at these host names and addresses, which may
        also prove itself as a client with it."""
        try:
            signer = load_pem_private_key((self.folder / "ca.key").read_bytes(), password=None)
            authority = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot use the authority in {self.folder}: {error}; make a new one with "
                "`penstock tls init RUN --host NAME` after moving this folder away"
            ) from None
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key = ec.generate_private_key(ec.SECP256R1())
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        made = (
            _builder(_name(name), authority.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False)
            .sign(signer, SHA256())
        )
        issued = Tls(certificate=self.folder / f"{name}.pem", key=self.folder / f"{name}.key")
        _write_key(issued.key, key)
        issued.certificate.write_bytes(made.public_bytes(Encoding.PEM))
        return issued


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        return x509.DNSName(text)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    until = now + datetime.timedelta(days=days)
    return (
        x509.CertificateBuilder(subject_name=subject, issuer_name=issuer, public_key=key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, until) - SKEW)
        .not_valid_after(until)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as out:
        out.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
