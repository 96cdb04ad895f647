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
    ttl_h: float = 24.0,
    json: bool = False,
) -> int:
    """Mint a token; one of role rollout is all that `penstock join` needs.

    Parameters
    ----------
    run
        The run folder, or its config file.
    role
        What its holder may do.
    ttl_h
        Hours until it expires.
    json
        Print one JSON object with the token and the URL to join.
    """
    from penstock.cli.output import note, print_json
    from penstock.cli.target import find_folder
    from penstock.errors import ConfigError
    from penstock.wire.auth import Role

    if ttl_h <= 0:
        raise ConfigError(f"--ttl-h {ttl_h:g} would be expired at once; give hours above 0")
    folder = find_folder(run)
    url = folder.endpoints().dataflow
    ttl_s = ttl_h * 3600.0
    minted = folder.token(folder.read_config().name, Role(role), ttl_s=ttl_s)
    if json:
        expires_at = round(time.time() + ttl_s, 3)
        print_json({"token": minted, "url": url, "role": role, "expires_at": expires_at})
    else:
        print(minted)
        if role == "rollout":
            note(f"join with: PENSTOCK_TOKEN=<the line above> penstock join {url}")
    if folder.holder() is None:
        note(f"this run is not running now; `penstock run {run}` starts it")
    return 0
