# SPDX-License-Identifier: Apache-2.0
"""`penstock token`: create, list and revoke access tokens of a run, and replace its signing key."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from penstock.fleet.run_folder import RunFolder

RoleName = Literal["admin", "trainer", "rollout", "stage", "gateway", "session", "relay", "reader"]
MAX_TTL_H = 24.0 * 365


def token(
    run: Path,
    /,
    *,
    role: RoleName = "rollout",
    name: str | None = None,
    untrusted: bool = False,
    for_relay: bool = False,
    ttl_h: float = 24.0,
    renew_days: float = 30.0,
    out: Path | None = None,
    json: bool = False,
) -> int:
    """Create an access token. `penstock join` needs one with role rollout.

    Args:
        run: Run folder, or its config file.
        role: Role of the token: what its holder may do.
        name: Who the token is for; by default drawn, such as rollout-3f9a1c. A node's name is this
            name, or this name, a dot and a suffix.
        untrusted: What the holder reports is checked again on the trusted side; with role rollout
            only.
        for_relay: Create a token that only relays accept, instead of one for the run's services.
        ttl_h: Hours until the token expires, unless its holder renews it.
        renew_days: Days for which a running holder may renew it, an hour at a time; not with role
            admin or session, and not with --for-relay.
        out: File to write the token to, readable only for you, instead of printing it.
        json: Print one JSON object with token and URL; for role relay also the public key.
    """
    from penstock.addresses import is_loopback
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.errors import ConfigError
    from penstock.runs.target import find_run_folder
    from penstock.runs.tokens import issue
    from penstock.wire.auth import Role
    from penstock.wire.keys import write_secret

    if not 0 < ttl_h <= MAX_TTL_H:
        raise ConfigError(
            f"--ttl-h {ttl_h:g}: must be greater than 0 hours and at most {MAX_TTL_H:g}"
        )
    if not 0 <= renew_days <= MAX_TTL_H / 24:
        raise ConfigError(f"--renew-days {renew_days:g}: must be 0 to {MAX_TTL_H / 24:g} days")
    folder = find_run_folder(run)
    endpoints = folder.endpoints()
    issued, credential = issue(
        folder,
        Role(role),
        name=name,
        ttl_s=ttl_h * 3600.0,
        renew_s=renew_days * 24 * 3600.0,
        is_trusted=not untrusted,
        for_relay=for_relay,
    )
    if out is not None:
        write_secret(out.absolute(), issued)
    is_relay = role == "relay" and not for_relay
    url = endpoints.weights if is_relay else endpoints.dataflow
    if json:
        found = {
            **({"token": issued} if out is None else {"file": str(out)}),
            "url": url,
            "role": role,
            "name": credential.subject,
            "id": credential.id,
            "is_trusted": credential.is_trusted,
            "expires_at": round(credential.expires_at, 3),
            "is_this_host_only": is_loopback(urlsplit(url).hostname or ""),
        }
        print_json({**found, "public_key": folder.public_key()} if is_relay else found)
    else:
        if out is None:
            print_text(issued)
        _print_hints(folder, role, url, "FILE" if out is None else str(out), for_relay=for_relay)
        print_note(f"it is for {credential.subject}; its id is {credential.id}")
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


def _print_hints(
    folder: RunFolder, role: RoleName, url: str, file: str, *, for_relay: bool
) -> None:
    from penstock.addresses import is_loopback
    from penstock.cli.output import print_note

    rest = f"--public-key={folder.public_key()} --token-file {file} --port PORT"
    hints = {
        "relay": f"start the relay with: penstock relay {url} {rest} --cache DIR",
        "gateway": f"start the gateway with: penstock gateway {url} {rest}",
        "session": "agents use it as api_key; their base_url is the URL of `penstock gateway` "
        "plus /v1",
        "rollout": f"join with: penstock join {url} --token-file {file}",
    }
    relay_hint = f"use it with: penstock join URL --relay RELAY --relay-token-file {file}"
    hint = relay_hint if for_relay else hints.get(role)
    if hint is None:
        return
    print_note(hint)
    if is_loopback(urlsplit(url).hostname or "") and not for_relay and role != "session":
        endpoints = folder.endpoints()
        others = () if role == "relay" else (endpoints.weights, *endpoints.partitions)
        print_note(_tunnel_hint(url, *others))


def ls(run: Path, /, *, json: bool = False) -> int:
    """List the live tokens that were created by command: whom each is for, and until when.

    Args:
        run: Run folder, or its config file.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.runs.target import find_run_folder
    from penstock.runs.tokens import live_tokens

    found = live_tokens(find_run_folder(run))
    if json:
        tokens = [
            {
                "id": each.id,
                "name": each.subject,
                "role": str(each.role),
                "is_trusted": each.is_trusted,
                "issued_at": each.issued_at,
                "expires_at": round(each.expires_at, 3),
                "renew_until": round(each.renew_until, 3),
            }
            for each in found
        ]
        print_json({"tokens": tokens})
        return 0
    if not found:
        print_note("no live token was created by command; `penstock token RUN` creates one")
    for each in found:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.ends_at))
        trust = "" if each.is_trusted else "  untrusted"
        print_text(f"{each.id}  {each.role:8}  until {until}  {each.subject}{trust}")
    return 0


def revoke(
    run: Path, id: str | None = None, /, *, name: str | None = None, json: bool = False
) -> int:
    """Refuse a token, or all tokens of a name, at every service, for good.

    Services of the run refuse it within a second, relays and gateways elsewhere within a few
    seconds. A node that used it is out, and its work goes to others.

    Args:
        run: Run folder, or its config file.
        id: Id of one token; `penstock token ls RUN` lists them.
        name: Revoke all tokens of this name instead, and issue none for it again.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.runs.target import find_run_folder
    from penstock.runs.tokens import revoke as revoke_tokens

    denied = revoke_tokens(find_run_folder(run), id=id, name=name)
    if json:
        print_json({"id": id, "name": name, "serial": denied.serial})
    else:
        print_note(f"revoked: {f'token {id}' if id else f'all tokens of {name}'}")
    return 0


def rotate(run: Path, /, *, now: bool = False, json: bool = False) -> int:
    """Replace the run's signing key, while the run goes on or not.

    Tokens of the old key stay valid until the last of them expires. The run's own services get new
    ones. Relays, gateways and nodes elsewhere need nothing new.

    Args:
        run: Run folder, or its config file.
        now: Refuse all tokens issued before, at once, because the key may be known to others:
            joined nodes need new tokens.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note
    from penstock.runs.target import find_run_folder
    from penstock.runs.tokens import rotate as rotate_key

    key_id = rotate_key(find_run_folder(run), now=now)
    if json:
        print_json({"key_id": key_id, "now": now})
    elif now:
        print_note("the signing key is replaced, and all tokens issued before are refused")
    else:
        print_note("the signing key is replaced; tokens of the old one end when they expire")
    return 0
