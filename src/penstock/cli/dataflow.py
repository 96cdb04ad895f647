# SPDX-License-Identifier: Apache-2.0
"""`penstock dataflow`: the dataflow service of a run, or one of its partitions."""

from __future__ import annotations

import gc
from pathlib import Path


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
    import uvloop

    from penstock.cli.service_options import listen_address, make_tls, run_tls
    from penstock.runs.service_process import enter_run, service_token
    from penstock.wire.auth import Audience, Renewer, Role, Verifier

    tls = make_tls(tls_cert, tls_key)  # before `enter_run` changes the working directory
    service = f"partition-{partition}" if partition else "dataflow"
    folder, config, endpoints = enter_run(run_dir, service)
    own_url = endpoints.dataflow
    if partition > len(endpoints.partitions):  # kept, since it may not move without an operator
        work_dir = Path(endpoints.work_dir)
        endpoints = folder.allocate_endpoints(
            work_dir, (), num_partitions=partition + 1, network=config.network
        )
    known_urls = dict(enumerate(endpoints.partitions, start=1))
    if partition:
        own_url = known_urls[partition]
    listen_host, listen_port = listen_address(own_url, host, port, config.network.host)
    tls = tls or run_tls(config.network)
    from penstock.dataflow.service.server import serve_dataflow, serve_partition
    from penstock.runs.evaluations import result_files

    verifier = Verifier.read(folder.keys, run=config.name, audience=Audience.DATAFLOW)
    verifier.renewer = Renewer(folder.keys)
    if partition:
        serving = serve_partition(
            config,
            folder.path,
            partition,
            coordinator_url=home or endpoints.dataflow,
            url=url or _own_url(own_url, host, listen_port, is_tls=tls is not None),
            token=service_token(folder, config.name, Role.PARTITION, subject=service),
            host=listen_host,
            port=listen_port,
            weights_url=endpoints.weights,
            verifier=verifier,
            tls=tls,
        )
    else:
        serving = serve_dataflow(
            config,
            folder.path,
            host=listen_host,
            port=listen_port,
            weights_url=endpoints.weights,
            verifier=verifier,
            partition_urls=known_urls,
            tls=tls,
            evaluation_writer=result_files(config, folder.path),
        )
    uvloop.run(serving)
    return 0


def _own_url(run_url: str, host: str | None, port: int, *, is_tls: bool) -> str:
    """Where nodes reach this partition: as the run has it, unless --host says otherwise."""
    if host is None:
        return f"{run_url.rpartition(':')[0]}:{port}"
    return f"{'https' if is_tls else 'http'}://{host}:{port}"
