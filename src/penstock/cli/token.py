# SPDX-License-Identifier: Apache-2.0
"""`penstock token`: create an access token for a run."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

RoleName = Literal["admin", "trainer", "rollout", "stage", "gateway", "session", "relay", "reader"]


def token(
    run: Path,
    /,
    *,
    role: RoleName = "rollout",
    for_relay: bool = False,
    ttl_h: float = 24.0,
    json: bool = False,
) -> int:
    """Create an access token. `penstock join` needs one with role rollout.

    Args:
        run: Run folder, or its config file.
        role: Role of the token: what its holder may do.
        for_relay: Create a token that only relays accept, instead of one for the run's services.
        ttl_h: Hours until the token expires.
        json: Print one JSON object with token and URL; for role relay also the public key.
    """
    from penstock.addresses import is_loopback
    from penstock.cli.output import print_json, print_note
    from penstock.errors import ConfigError
    from penstock.runs.target import find_run_folder
    from penstock.wire.auth import Role

    if ttl_h <= 0:
        raise ConfigError(f"--ttl-h {ttl_h:g}: must be greater than 0 hours")
    folder = find_run_folder(run)
    endpoints, name, ttl_s = folder.endpoints(), folder.read_config().name, ttl_h * 3600.0
    mint = folder.relay_token if for_relay else folder.token
    minted = mint(name, Role(role), ttl_s=ttl_s)
    is_relay = role == "relay" and not for_relay
    url = endpoints.weights if is_relay else endpoints.dataflow
    is_local = is_loopback(urlsplit(url).hostname or "")
    if json:
        expires_at = round(time.time() + ttl_s, 3)
        found = {
            "token": minted,
            "url": url,
            "role": role,
            "expires_at": expires_at,
            "is_this_host_only": is_local,
        }
        print_json({**found, "public_key": folder.public_key()} if is_relay else found)
    else:
        print(minted)
        command, key = "PENSTOCK_TOKEN=<the line above> penstock", folder.public_key()
        hints = {
            "relay": f"start the relay with: {command} relay {url} --public-key={key} --cache DIR "
            "--port PORT",
            "gateway": f"start the gateway with: {command} gateway {url} --public-key={key} "
            "--port PORT",
            "session": "agents use it as api_key; their base_url is the URL of `penstock gateway` "
            "plus /v1",
            "rollout": f"join with: {command} join {url}",
        }
        relay_hint = "use it with: PENSTOCK_RELAY_TOKEN=<the line above> penstock join URL --relay "
        if hint := f"{relay_hint}RELAY" if for_relay else hints.get(role):
            print_note(hint)
            if is_local and not for_relay and role != "session":
                others = () if is_relay else (endpoints.weights, *endpoints.partitions)
                print_note(_tunnel_hint(url, *others))
    if folder.launcher_pid() is None:
        print_note(f"the run is not running; `penstock run {run}` starts it")
    return 0


def _tunnel_hint(url: str, *others: str) -> str:
    """How another host reaches these URLs of this host's loopback."""
    ports = [one.rpartition(":")[2] for one in (url, *others)]
    options = " ".join(f"-L {port}:127.0.0.1:{port}" for port in ports)
    return (
        f"{url} is reachable on this host only. From another host, open a tunnel there first: "
        f"ssh -N {options} {socket.gethostname()}"
    )
