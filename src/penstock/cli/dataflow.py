# SPDX-License-Identifier: Apache-2.0
"""`penstock dataflow`: the dataflow service of a run, or one of its partitions."""

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
    """Run the dataflow service until SIGTERM.

    With --partition N it serves only data partition N, with a separate ledger folder. A new
    partition joins a running service.

    Args:
        run_dir: Run folder.
        host: Address to listen on; off loopback only with TLS.
        port: Port to listen on; by default the run's own.
        tls_cert: TLS certificate file; required off loopback.
        tls_key: TLS key file.
        partition: Number of an additional data partition; 0 is the coordinator and its partition.
        home: URL of the coordinator, for an additional partition; by default the run's own.
        url: URL at which nodes and trainers reach this partition, if it differs from the listen
            address.
    """
    gc.disable()  # objects made at startup stay; the service enables collection once it is up
    from penstock.cli.service_options import make_tls
    from penstock.runs.service_process import enter_run

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

    from penstock.cli.service_options import listen_address
    from penstock.dataflow.service.server import serve_dataflow
    from penstock.wire.auth import Audience, Verifier

    folder, config, endpoints = context
    listen_host, listen_port = listen_address(endpoints.dataflow, host, port)
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

    from penstock.cli.service_options import listen_address
    from penstock.dataflow.service.server import serve_partition
    from penstock.fleet.run_folder import free_port
    from penstock.runs.service_process import service_token
    from penstock.wire.auth import Audience, Role, Verifier

    folder, config, endpoints = context
    chosen = dict(enumerate(endpoints.partitions, start=1)).get(index)
    listen_host, listen_port = listen_address(
        chosen or f"http://127.0.0.1:{free_port()}", host, port
    )
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
