# SPDX-License-Identifier: Apache-2.0
"""The weights front of a store, in a process of its own, over TLS as everywhere beyond loopback.

`weights_origin.py HOST PORT FOLDER`, where FOLDER holds `store`, `keys`, `cert.pem`, `key.pem`."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.weights.update import SERVER_KEPT_S
from penstock.wire.auth import Audience, Signer
from penstock.wire.serving import Tls, serve

RUN = "wan"


def write_certificate(folder: Path, addresses: Sequence[str]) -> Path:
    """Signed by itself, for a day; clients name it in SSL_CERT_FILE."""
    names = ",".join(f"IP:{address}" for address in addresses)
    words = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=origin -addext"
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    subprocess.run(
        ["openssl", *words.split(), f"subjectAltName={names}", *files],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return folder / "cert.pem"


def main(host: str, port: int, folder: Path) -> None:
    verifier = Signer.create(folder / "keys", RUN).verifier(Audience.WEIGHTS)
    app = build(Origin(DirectoryStore(folder / "store")), verifier)
    tls = Tls(certificate=folder / "cert.pem", key=folder / "key.pem")
    asyncio.run(serve(app, host, port, tls, idle_s=SERVER_KEPT_S))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
