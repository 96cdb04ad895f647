# SPDX-License-Identifier: Apache-2.0
"""`penstock dataflow`: the ledger of a run as one service."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from penstock.config import RunConfig
    from penstock.fleet.run_folder import Endpoints, RunFolder
    from penstock.wire.serving import Tls

    RunContext: TypeAlias = tuple[RunFolder, RunConfig, Endpoints]


def dataflow(
    *,
    run_dir: Path,
    host: str | None = None,
    port: int | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    partition: int = 0,
    home: str | None = None,
    url: str | None = None,
) -> int:
    """Serve the ledger of a run until SIGTERM.

    With --partition N it serves data partition N alone, in a ledger folder of its own; starting one
    adds it to a running service.

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
    partition
        Number of a further data partition; 0 is home with the partition beside it.
    home
        Address of home, for a further partition; by default the one of the run.
    url
        Address under which nodes and trainers reach this partition, when it differs from where it
        listens.
    """
    gc.disable()  # what a start makes stays; the service turns the collector on when it is there
    from penstock.cli.service_process import enter_run, make_tls

    tls = make_tls(tls_cert, tls_key)  # before `enter_run` changes the working directory
    context = enter_run(run_dir, f"partition-{partition}" if partition else "dataflow")
    if partition:
        _serve_partition(context, partition, host, port, tls, home, url)
    else:
        _serve_coordinator(context, host, port, tls)
    return 0


def _serve_coordinator(
    context: RunContext, host: str | None, port: int | None, tls: Tls | None
) -> None:
    import uvloop

    from penstock.cli.service_process import address
    from penstock.dataflow.service.server import serve_dataflow
    from penstock.wire.auth import Audience, Verifier

    folder, config, endpoints = context
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


def _serve_partition(
    context: RunContext,
    index: int,
    host: str | None,
    port: int | None,
    tls: Tls | None,
    home: str | None,
    url: str | None,
) -> None:
    import uvloop

    from penstock.cli.service_process import address, service_token
    from penstock.dataflow.service.server import serve_partition
    from penstock.fleet.run_folder import free_port
    from penstock.wire.auth import Audience, Role, Verifier

    folder, config, endpoints = context
    chosen = dict(enumerate(endpoints.partitions, start=1)).get(index)
    listen_host, listen_port = address(chosen or f"http://127.0.0.1:{free_port()}", host, port)
    scheme = "https" if tls else "http"
    uvloop.run(
        serve_partition(
            config,
            folder.path,
            index,
            coordinator_url=home or endpoints.dataflow,
            token=service_token(folder, config, Role.PARTITION),
            url=url or f"{scheme}://{listen_host}:{listen_port}",
            host=listen_host,
            port=listen_port,
            weights_url=endpoints.weights,
            verifier=Verifier.read(folder.keys, run=config.name, audience=Audience.DATAFLOW),
            tls=tls,
        )
    )
