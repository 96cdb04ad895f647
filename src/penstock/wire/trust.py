# SPDX-License-Identifier: Apache-2.0
"""Which servers this process trusts, and the certificate it shows them.

The certificates of the system, and the private authority of a run. One context for all clients, and
none for a server beyond this host without TLS: a token would be sent in clear text.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import httpx2

from penstock.addresses import is_loopback
from penstock.errors import ConfigError

CA_ENV = "PENSTOCK_CA"
"""File of a private authority to trust, beside the authorities of the system."""
CERTIFICATE_ENV = "PENSTOCK_TLS_CERT"
KEY_ENV = "PENSTOCK_TLS_KEY"
"""This host's certificate and key, for servers that ask for one."""

MAX_FILE_BYTES = 16 << 20
ROOTS_ENV = "SSL_CERT_FILE"
"""Roots to trust instead of the usual ones."""
_ENVS = (CA_ENV, CERTIFICATE_ENV, KEY_ENV)
_by_server: dict[str, dict[str, str]] = {}
"""What is used in place of the environment, by scheme, host and port."""


def trust(ca: Path | None, certificate: Path | None = None, key: Path | None = None) -> None:
    """Trust a private authority in this process and its children, wherever they call."""
    os.environ.update(_files(ca, certificate, key))


def trust_at(
    urls: Iterable[str], ca: Path | None, certificate: Path | None = None, key: Path | None = None
) -> None:
    """Trust a private authority at these addresses, and nowhere else: one process may look at the
    runs of several owners, who must not vouch for each other's servers."""
    files = _files(ca, certificate, key)
    _by_server.update((_server(url), files) for url in urls)


def _files(*paths: Path | None) -> dict[str, str]:
    for path in paths:
        if path is not None and not path.is_file():
            raise ConfigError(
                f"{path}: no such file; make certificates with `penstock tls init`, or copy ca.pem "
                "from the host that has the run folder"
            )
        if path is not None and path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: longer than {MAX_FILE_BYTES} bytes; name a PEM file")
    found = zip(_ENVS, paths, strict=True)
    return {name: str(path.absolute()) for name, path in found if path is not None}


def _server(url: str) -> str:
    where = urlsplit(url)
    return f"{where.scheme}://{where.netloc}"


def refuse_clear_text(url: str) -> None:
    """Raise ConfigError for an http:// URL off loopback: a call to it would show its token."""
    where = urlsplit(url)
    if where.scheme != "http" or is_loopback(where.hostname or ""):
        return
    raise ConfigError(
        f"refusing to call {url}: the token would be sent in clear text. Use https:// (start the "
        "service with --tls-cert and --tls-key), or a tunnel: `ssh -N -L "
        f"{where.port or 80}:127.0.0.1:{where.port or 80} {where.hostname}`, then use "
        f"http://127.0.0.1:{where.port or 80}"
    )


def client_context(url: str) -> ssl.SSLContext | bool:
    """How to verify the server of this URL; plain HTTP needs no certificates loaded. Raises
    ConfigError for plain HTTP to another host: of weights or a partition, say, which the run
    named."""
    refuse_clear_text(url)
    if not url.startswith("https://"):
        return False
    own = _by_server.get(_server(url), {})
    return _context(*(own.get(name) or os.environ.get(name, "") for name in (*_ENVS, ROOTS_ENV)))


@lru_cache(maxsize=8)
def _context(ca: str, certificate: str, key: str, roots: str) -> ssl.SSLContext:
    context = httpx2.create_ssl_context(trust_env=bool(roots))
    try:
        if ca:
            context.load_verify_locations(cafile=ca)
        if certificate and key:
            context.load_cert_chain(certificate, key, password="")  # None asks the terminal
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"cannot load {ca or certificate} as PEM ({error}); make certificates with `penstock "
            "tls init`"
        ) from None
    return context
