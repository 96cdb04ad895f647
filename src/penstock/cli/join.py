# SPDX-License-Identifier: Apache-2.0
"""`penstock join`: lend this machine to a run, with a URL and a token and nothing else."""

from __future__ import annotations

import os
import re
import secrets
import socket
import tempfile
from pathlib import Path

KNOCK_S = 20.0


def join(
    url: str,
    /,
    *,
    token: str | None = None,
    name: str | None = None,
    capacity: int | None = None,
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
    """
    import uvloop

    from penstock.cli.service import import_from, leave
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.types import NodeId

    given = token or os.environ.pop("PENSTOCK_TOKEN", "")
    if not given:
        raise ConfigError(
            "no token: set PENSTOCK_TOKEN or give --token; `penstock token RUN --role rollout` "
            "mints one where the run was started"
        )
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address; it looks like http://127.0.0.1:18080")
    node = name or f"{_host()}-{secrets.token_hex(2)}"
    logs.configure(node)
    import_from((str(Path.cwd()),))
    _knock(url, given)
    from penstock.rollout.node import run_node

    uvloop.run(
        run_node(url, given, node_id=NodeId(node), state_dir=_state_dir(node), capacity=capacity)
    )
    leave(0)


def _knock(url: str, token: str) -> None:
    """Is somebody there at all? Later outages are sat out; a wrong address is told soon."""
    from penstock.wire.client import Caller
    from penstock.wire.server import Health

    caller = Caller(url, token)
    try:
        caller.call("GET", "/healthz", None, Health, deadline_s=KNOCK_S)
    finally:
        caller.close()


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname()).strip("-")[:40] or "node"


def _state_dir(node: str) -> Path:
    """In the user's cache, or a temporary folder where there is no home."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    try:
        folder = Path(root) / "penstock" / "nodes" / node
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix=f"penstock-{node}-"))
    return folder
