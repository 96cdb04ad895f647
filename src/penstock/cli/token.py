# SPDX-License-Identifier: Apache-2.0
"""`penstock token`: mint a credential for somebody who joins a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

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
    """Mint a token; one of role rollout is all that `penstock join` needs.

    Parameters
    ----------
    run
        The run folder, or its config file.
    role
        What its holder may do; relay is for `penstock relay`.
    for_relay
        Make the token that is shown to relays and is worth nothing elsewhere, instead of the one
        for the run's own services.
    ttl_h
        Hours until it expires.
    json
        Print one JSON object with the token and the URL to join; a relay's with the public key.
    """
    from penstock.cli.output import note, print_json
    from penstock.errors import ConfigError
    from penstock.runs.target import find_run_folder
    from penstock.wire.auth import Role

    if ttl_h <= 0:
        raise ConfigError(f"--ttl-h {ttl_h:g} would be expired at once; give hours above 0")
    folder = find_run_folder(run)
    endpoints, name, ttl_s = folder.endpoints(), folder.read_config().name, ttl_h * 3600.0
    mint = folder.relay_token if for_relay else folder.token
    minted = mint(name, Role(role), ttl_s=ttl_s)
    is_relay = role == "relay" and not for_relay
    url = endpoints.weights if is_relay else endpoints.dataflow
    if json:
        expires_at = round(time.time() + ttl_s, 3)
        found = {"token": minted, "url": url, "role": role, "expires_at": expires_at}
        print_json({**found, "public_key": folder.public_key()} if is_relay else found)
    else:
        print(minted)
        if for_relay:
            note("show it to relays: PENSTOCK_RELAY_TOKEN=<the line above> … --relay URL")
        elif is_relay:
            note(
                f"start it with: PENSTOCK_TOKEN=<the line above> penstock relay {url} "
                f"--public-key={folder.public_key()} --cache DIR --port PORT"
            )
        elif role == "gateway":
            note(
                f"serve agents with: PENSTOCK_TOKEN=<the line above> penstock gateway {url} "
                f"--public-key={folder.public_key()} --port PORT"
            )
        elif role == "session":
            note("an agent's api_key at `penstock gateway`; base_url is its address and /v1")
        elif role == "rollout":
            note(f"join with: PENSTOCK_TOKEN=<the line above> penstock join {url}")
    if folder.launcher_pid() is None:
        note(f"this run is not running now; `penstock run {run}` starts it")
    return 0
