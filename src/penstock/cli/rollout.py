# SPDX-License-Identifier: Apache-2.0
"""`penstock rollout`: a rollout node on the machine that has the run folder."""

from __future__ import annotations

from pathlib import Path


def rollout(
    *,
    run_dir: Path,
    name: str = "node-0",
    policy: str | None = None,
    capacity: int | None = None,
    relay: str | None = None,
    serve_weights: str | None = None,
    serve_gb: float = 50.0,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Lease tasks, generate, score and deliver until the run ends or SIGTERM.

    Args:
        run_dir: Run folder.
        name: Name of this node; keep it across restarts.
        policy: Policy whose engine settings to use; optional if the run has only one.
        capacity: Number of tasks to run in parallel; by default the config's value.
        relay: URL of a relay to fetch weights from before the run's weight server.
        serve_weights: HOST:PORT on which this node serves weights to other nodes; off loopback only
            with TLS.
        serve_gb: Disk space for weights kept for other nodes, in GB.
        tls_cert: TLS certificate file for --serve-weights.
        tls_key: TLS key file for --serve-weights.
    """
    import uvloop

    from penstock.cli.relay_options import RELAY_EXAMPLE, parse_sharing, pop_relay_token
    from penstock.cli.service_options import check_url, exit_now, make_tls
    from penstock.fleet.services import TOKEN_TTL_S
    from penstock.runs.join import local_node_options
    from penstock.runs.service_process import enter_run, resolve_policy, service_token
    from penstock.types import NodeId, subject_of_node
    from penstock.wire.auth import Role

    tls = make_tls(tls_cert, tls_key)  # before `enter_run` changes the working directory
    relay_token = pop_relay_token()
    folder, config, endpoints = enter_run(run_dir, name)
    model = config.models[resolve_policy(config, policy)]
    node_options = local_node_options(folder, model, name)
    if relay is not None and not relay_token:
        relay_token = folder.relay_token(config.name, Role.ROLLOUT, ttl_s=TOKEN_TTL_S)
    state_dir = folder.nodes / name
    sharing = parse_sharing(serve_weights, serve_gb, state_dir, tls, folder.public_key)
    from penstock.rollout.node import run_node

    uvloop.run(
        run_node(
            endpoints.dataflow,
            service_token(folder, config, Role.ROLLOUT, subject_of_node(NodeId(name))),
            node_id=NodeId(name),
            capacity=capacity or model.capacity,
            relay=None if relay is None else (check_url(relay, example=RELAY_EXAMPLE), relay_token),
            sharing=sharing,
            **node_options,
        )
    )
    exit_now(0)
