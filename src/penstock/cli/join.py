# SPDX-License-Identifier: Apache-2.0
"""`penstock join`: lend this machine to a run, with a URL and a token and nothing else."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
from pathlib import Path

CONNECT_TIMEOUT_S = 20.0


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
    """Become a rollout node of a run until it ends, or until SIGTERM or Ctrl-C.

    Parameters
    ----------
    url
        Address of the run's dataflow; `penstock token` prints it.
    token
        A rollout token; better given as PENSTOCK_TOKEN, which other users cannot see.
    name
        Names this node; by default the host's name and four random signs.
    capacity
        Slots to work on at once.
    engines
        Engines of each policy inside this node.
    relay
        Address of a relay to ask for weights before the run's own front; PENSTOCK_RELAY_TOKEN
        holds the token shown to it.
    serve_weights
        HOST:PORT where this node is a relay to its neighbours; beyond this machine only with TLS.
    serve_gb
        Most that weights kept for neighbours may take, in GB, beside the node's own.
    public_key
        The run's public key, or a file with it; --serve-weights knows the run's nodes by it.
    tls_cert
        Certificate file for --serve-weights.
    tls_key
        Its key file.
    """
    import uvloop

    from penstock.cli.relay_options import (
        check_url,
        parse_sharing,
        pop_relay_token,
        read_public_key,
    )
    from penstock.cli.service_process import add_import_paths, exit_now, make_tls
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.types import NodeId

    node_token = token or os.environ.pop("PENSTOCK_TOKEN", "")
    if not node_token:
        raise ConfigError(
            "no token: set PENSTOCK_TOKEN or give --token; `penstock token RUN --role rollout` "
            "mints one where the run was started"
        )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address; it looks like http://127.0.0.1:18080")
    relay_token = pop_relay_token()
    if relay is not None and not relay_token:
        raise ConfigError(
            "no token for the relay: set PENSTOCK_RELAY_TOKEN; `penstock token RUN --for-relay` "
            "mints one where the run was started. Your other token is not for relays"
        )
    node = name or f"{host_name()}-{secrets.token_hex(2)}"
    tls, state_dir = make_tls(tls_cert, tls_key), node_state_dir(node)
    sharing = parse_sharing(
        serve_weights, serve_gb, state_dir, tls, lambda: read_public_key(public_key)
    )
    logs.configure(node)
    add_import_paths((str(Path.cwd()),))
    _check_reachable(url, node_token)
    from penstock.rollout.node import run_node

    uvloop.run(
        run_node(
            url,
            node_token,
            node_id=NodeId(node),
            state_dir=state_dir,
            capacity=capacity,
            num_engines=engines,
            relay=None if relay is None else (check_url(relay), relay_token),
            sharing=sharing,
        )
    )
    exit_now(0)


def _check_reachable(url: str, token: str) -> None:
    """Is somebody there at all? Later outages are sat out; a wrong address is told soon."""
    from penstock.wire.client import ServiceClient
    from penstock.wire.routes import Health

    caller = ServiceClient(url, token)
    try:
        caller.call("GET", "/healthz", None, Health, deadline_s=CONNECT_TIMEOUT_S)
    finally:
        caller.close()


def host_name() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:40] or "node"


def node_state_dir(node: str) -> Path:
    """In the user's cache, or a temporary folder where there is no home."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    try:
        folder = Path(root) / "penstock" / "nodes" / node
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"penstock-{node}-"))
    return folder
