# SPDX-License-Identifier: Apache-2.0
"""`penstock rollout`: one node of a run folder on this machine."""

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

    Parameters
    ----------
    run_dir
        The run folder.
    name
        Names this node; kept over its restarts.
    policy
        Whose engine settings to use; may be left out when the run has one policy.
    capacity
        Slots to work on at once; by default the config's.
    relay
        Address of a relay to ask for weights before the run's own front.
    serve_weights
        HOST:PORT where this node is a relay to its neighbours; beyond this machine only with TLS.
    serve_gb
        Most that weights kept for neighbours may take, in GB, beside the node's own.
    tls_cert
        Certificate file for --serve-weights.
    tls_key
        Its key file.
    """
    import uvloop

    from penstock.cli.relay_options import check_url, parse_sharing, pop_relay_token
    from penstock.cli.service_process import (
        enter_run,
        exit_now,
        make_tls,
        resolve_policy,
        service_token,
    )
    from penstock.fleet.services import TOKEN_TTL_S
    from penstock.types import NodeId
    from penstock.wire.auth import Role

    tls = make_tls(tls_cert, tls_key)  # before `enter_run` changes the working directory
    relay_token = pop_relay_token()
    folder, config, endpoints = enter_run(run_dir, name)
    model = config.models[resolve_policy(config, policy)]
    folder.acks.mkdir(exist_ok=True)
    if relay is not None and not relay_token:
        relay_token = folder.relay_token(config.name, Role.ROLLOUT, ttl_s=TOKEN_TTL_S)
    state_dir = folder.nodes / name
    sharing = parse_sharing(serve_weights, serve_gb, state_dir, tls, folder.public_key)
    from penstock.rollout.node import run_node

    uvloop.run(
        run_node(
            endpoints.dataflow,
            service_token(folder, config, Role.ROLLOUT),
            node_id=NodeId(name),
            state_dir=state_dir,
            acks=folder.acks / f"{name}.txt",
            capacity=capacity or model.capacity,
            engine=model.engine,
            engine_url=model.engine_url,
            vllm_environment=model.vllm.environment or "",
            num_engines=model.engines,
            max_paused=model.max_paused,
            relay=None if relay is None else (check_url(relay), relay_token),
            sharing=sharing,
        )
    )
    exit_now(0)
