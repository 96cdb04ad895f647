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
    evaluates_only: bool = False,
    tags: str | None = None,
    relay: str | None = None,
    relay_token_file: Path | None = None,
    serve_weights: str | None = None,
    serve_gb: float = 50.0,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Lease tasks, generate, score and deliver until the run ends or SIGTERM.

    Args:
        run_dir: Run folder.
        name: Name of this node; keep it across restarts.
        policy: Policy whose engine settings to use, and which it serves with those that share a
            source with it; optional if the run has only one.
        capacity: Number of tasks to run in parallel; by default the config's value.
        evaluates_only: Do nothing but evaluate, for a run with `eval`.
        tags: What this node says about itself, separated by commas: gpus=8 and cost=12.5 (per
            hour) are counted in `penstock report`.
        relay: URL of a relay to fetch weights from before the run's weight server.
        relay_token_file: File with a token for the relay; by default the node makes its own.
        serve_weights: HOST:PORT on which this node serves weights to other nodes; off loopback only
            with TLS.
        serve_gb: Disk space for weights kept for other nodes, in GB.
        tls_cert: TLS certificate file for --serve-weights.
        tls_key: TLS key file for --serve-weights.
    """
    import uvloop

    from penstock.cli.relay_options import RELAY_EXAMPLE, parse_sharing, read_relay_token
    from penstock.cli.service_options import check_url, exit_now, make_tls
    from penstock.fleet.launchers.local import EXIT_DRAINED
    from penstock.runs.join import local_node_options, split_tags
    from penstock.runs.service_process import (
        enter_run,
        relay_token,
        resolve_policy,
        service_token,
    )
    from penstock.types import NodeId, subject_of_node
    from penstock.wire.auth import Role
    from penstock.wire.denied import FILE
    from penstock.wire.trust import refuse_clear_text

    tls = make_tls(tls_cert, tls_key)  # before `enter_run` changes the working directory
    if relay is not None:
        refuse_clear_text(check_url(relay, example=RELAY_EXAMPLE))
    to_relay = read_relay_token(relay, relay_token_file)
    folder, config, endpoints = enter_run(run_dir, name)
    served = resolve_policy(config, policy)
    node_options = local_node_options(folder, config, served, name)
    node_options["evaluates_only"] = evaluates_only
    node_options["tags"] = split_tags(tags)
    subject = subject_of_node(NodeId(name))
    if relay is not None and to_relay is None:
        to_relay = (
            relay,
            relay_token(folder, config.name, Role.ROLLOUT, subject=subject),
        )
    state_dir = folder.nodes / name
    sharing = parse_sharing(
        serve_weights, serve_gb, state_dir, tls, folder.public_key, folder.keys / FILE
    )
    from penstock.rollout.node import run_node

    is_drained = uvloop.run(
        run_node(
            endpoints.dataflow,
            service_token(folder, config.name, Role.ROLLOUT, subject=name),
            node_id=NodeId(name),
            capacity=capacity or config.models[served].capacity,
            relay=to_relay,
            sharing=sharing,
            store_root=folder.weights,
            **node_options,
        )
    )
    exit_now(EXIT_DRAINED if is_drained else 0)
