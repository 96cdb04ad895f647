# SPDX-License-Identifier: Apache-2.0
"""`penstock dataflow`: the ledger of a run as one service."""

from __future__ import annotations

from pathlib import Path


def dataflow(
    *,
    run_dir: Path,
    host: str | None = None,
    port: int | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Serve the ledger of a run until SIGTERM.

    Parameters
    ----------
    run_dir
        The run folder; its config.yaml says what to serve.
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
    from penstock.dataflow.server import serve_dataflow
    from penstock.wire.auth import Audience, Verifier

    tls = make_tls(tls_cert, tls_key)  # before `enter` changes the working directory
    folder, config, endpoints = enter(run_dir, "dataflow")
    listen_host, listen_port = address(endpoints.dataflow, host, port)
    uvloop.run(
        serve_dataflow(
            config,
            folder.path,
            host=listen_host,
            port=listen_port,
            weights_url=endpoints.weights,
            verifier=Verifier.read(folder.keys, run=config.name, audience=Audience.DATAFLOW),
            tls=tls,
        )
    )
    return 0
