# SPDX-License-Identifier: Apache-2.0
"""`penstock join`: join a run as a rollout node, with only a URL and a token."""

from __future__ import annotations

import secrets
from pathlib import Path


def join(
    url: str,
    /,
    *,
    token: str | None = None,
    name: str | None = None,
    capacity: int | None = None,
    engines: int = 1,
    relay: str | None = None,
    serve_weights: str | None = None,
    serve_gb: float = 50.0,
    public_key: str | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Join a run as a rollout node until the run ends, or until SIGTERM or Ctrl-C.

    Args:
        url: URL of the run's dataflow; `penstock token` prints it.
        token: Rollout token. Prefer PENSTOCK_TOKEN: other users of this machine can read the
            command line.
        name: Name of this node; by default the host name and four random characters. The name in
            the token comes before it.
        capacity: Number of tasks to run in parallel.
        engines: Number of inference engines per policy in this node.
        relay: URL of a relay to fetch weights from before the run's weight server; needs a token in
            PENSTOCK_RELAY_TOKEN.
        serve_weights: HOST:PORT on which this node serves weights to other nodes; off loopback only
            with TLS.
        serve_gb: Disk space for weights kept for other nodes, in GB.
        public_key: The run's public key, or a file that contains it; required by --serve-weights.
        tls_cert: TLS certificate file for --serve-weights.
        tls_key: TLS key file for --serve-weights.
    """
    import uvloop

    from penstock.cli.relay_options import (
        RELAY_EXAMPLE,
        parse_sharing,
        pop_relay_token,
        read_public_key,
    )
    from penstock.cli.service_options import check_url, exit_now, make_tls, require_token
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.runs.join import (
        check_reachable,
        host_name,
        node_name,
        node_state_dir,
        with_expiry_warnings,
    )
    from penstock.runs.service_process import add_import_paths
    from penstock.wire.serving import refuse_clear_text

    node_token = require_token(token, role="rollout")
    refuse_clear_text(check_url(url, example="http://127.0.0.1:18080"))
    if relay is not None:
        refuse_clear_text(check_url(relay, example=RELAY_EXAMPLE))
    relay_token = pop_relay_token()
    if relay is not None and not relay_token:
        raise ConfigError(
            "no token for the relay: set PENSTOCK_RELAY_TOKEN. On the machine that has the run "
            "folder, `penstock token RUN --for-relay` creates one; a rollout token does not work"
        )
    node = node_name(node_token, name or f"{host_name()}-{secrets.token_hex(2)}")
    tls, state_dir = make_tls(tls_cert, tls_key), node_state_dir(node)
    sharing = parse_sharing(
        serve_weights, serve_gb, state_dir, tls, lambda: read_public_key(public_key)
    )
    logs.configure(node)
    add_import_paths((str(Path.cwd()),))
    check_reachable(url, node_token)
    from penstock.rollout.node import run_node

    work = run_node(
        url,
        node_token,
        node_id=node,
        state_dir=state_dir,
        capacity=capacity,
        num_engines=engines,
        relay=None if relay is None else (relay, relay_token),
        sharing=sharing,
    )
    uvloop.run(with_expiry_warnings(work, node_token))
    exit_now(0)
