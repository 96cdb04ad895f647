# SPDX-License-Identifier: Apache-2.0
"""`penstock weights serve`: the read-only HTTP front over a run's weight store."""

from __future__ import annotations

from pathlib import Path


def serve(
    *,
    run_dir: Path,
    host: str | None = None,
    port: int | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Serve manifests and blobs of a run until SIGTERM.

    Parameters
    ----------
    run_dir
        The run folder; its weights/ is served.
    host
        Address to listen on; beyond this machine only with TLS.
    port
        Port to listen on; by default the one the run chose.
    tls_cert
        Certificate file, to listen beyond this machine.
    tls_key
        Its key file.
    """
    import uvloop

    from penstock.cli.service import address, enter, make_tls
    from penstock.weights.origin import Origin
    from penstock.weights.server import build
    from penstock.weights.store import DirectoryStore
    from penstock.wire.auth import Audience, Verifier
    from penstock.wire.server import serve as serve_app

    tls = make_tls(tls_cert, tls_key)  # before `enter` changes the working directory
    folder, config, endpoints = enter(run_dir, "weights")
    verifier = Verifier.read(folder.keys, run=config.name, audience=Audience.WEIGHTS)
    app = build(Origin(DirectoryStore(folder.weights)), verifier)
    listen_host, listen_port = address(endpoints.weights, host, port)
    uvloop.run(serve_app(app, listen_host, listen_port, tls))
    return 0
