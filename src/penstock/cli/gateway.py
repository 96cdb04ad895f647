# SPDX-License-Identifier: Apache-2.0
"""`penstock gateway`: serve agents outside a run, and let it learn from their sessions."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.wire.auth import Credential

BACKLOG = 1024


def gateway(
    where: str,
    /,
    *,
    port: int,
    host: str = "127.0.0.1",
    token: str | None = None,
    public_key: str | None = None,
    name: str | None = None,
    policy: str | None = None,
    capacity: int | None = None,
    engines: int = 1,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> int:
    """Serve agents until SIGTERM or Ctrl-C; a run that ends does not end it.

    Parameters
    ----------
    where
        The run folder, its config file, or the address of its dataflow.
    port
        Port to listen on.
    host
        Address to listen on; beyond this machine only with TLS.
    token
        A gateway token, for an address; better given as PENSTOCK_TOKEN, which other users cannot
        see.
    public_key
        The run's public key, or a file with it, for an address; `penstock token RUN --role gateway`
        prints it.
    name
        Names this gateway in the run; by default the host's name and four random signs.
    policy
        Whose engine settings to use, of a run folder with several policies.
    capacity
        Sessions recorded at once.
    engines
        Engines of each policy inside this process, for an address; a run folder says it itself.
    tls_cert
        Certificate file, to listen beyond this machine.
    tls_key
        Its key file.
    """
    import uvloop

    from penstock.cli.join import host_name, node_state_dir
    from penstock.cli.output import note
    from penstock.cli.service_process import address, exit_now, make_tls
    from penstock.observe import logs
    from penstock.types import NodeId
    from penstock.wire.serving import require_tls_off_loopback

    tls = make_tls(tls_cert, tls_key)
    require_tls_off_loopback(host, tls)
    node = name or f"gateway-{host_name()}-{secrets.token_hex(2)}"
    bind = address("", host, port)
    if where.startswith(("http://", "https://")):
        url, own_token, verify = _join_by_url(where, token, public_key)
        node_options: dict[str, Any] = {"state_dir": node_state_dir(node), "num_engines": engines}
    else:
        url, own_token, verify, node_options = _join_by_folder(Path(where), node, policy)
    logs.configure(node)
    listener = socket.create_server(bind, backlog=BACKLOG)
    scheme = "http" if tls is None else "https"
    base_url = f"{scheme}://{host}:{listener.getsockname()[1]}/v1"
    note(f"agents: base_url {base_url}, api_key a token of `penstock token RUN --role session`")
    from penstock.rollout.online import run_online

    uvloop.run(
        run_online(
            url,
            own_token,
            verify,
            node_id=NodeId(node),
            listener=listener,
            tls=tls,
            capacity=capacity,
            **node_options,
        )
    )
    exit_now(0)


def _join_by_url(
    url: str, token: str | None, public_key: str | None
) -> tuple[str, str, Callable[[str], Credential]]:
    from penstock.cli.relay_options import read_public_key
    from penstock.errors import ConfigError
    from penstock.wire.auth import Audience, Verifier

    own_token = token or os.environ.pop("PENSTOCK_TOKEN", "")
    if not own_token or not public_key:
        raise ConfigError(
            "a gateway of an address needs PENSTOCK_TOKEN (or --token) and --public-key; "
            "`penstock token RUN --role gateway` prints both where the run was started"
        )
    verifier = Verifier.from_token(
        own_token, read_public_key(public_key), audience=Audience.GATEWAY
    )
    return url, own_token, verifier.verify


def _join_by_folder(
    run: Path, node: str, policy: str | None
) -> tuple[str, str, Callable[[str], Credential], dict[str, Any]]:
    from penstock.cli.service_process import resolve_policy
    from penstock.fleet.services import TOKEN_TTL_S
    from penstock.runs.target import find_run_folder
    from penstock.wire.auth import Audience, Role, Verifier

    folder = find_run_folder(run)
    config, endpoints = folder.read_config(), folder.endpoints()
    model = config.models[resolve_policy(config, policy)]
    folder.acks.mkdir(exist_ok=True)
    verifier = Verifier.read(folder.keys, run=config.name, audience=Audience.GATEWAY)
    node_options = {
        "state_dir": folder.nodes / node,
        "acks": folder.acks / f"{node}.txt",
        "engine": model.engine,
        "engine_url": model.engine_url,
        "vllm_environment": model.vllm.environment or "",
        "num_engines": model.engines,
        "max_paused": model.max_paused,
    }
    own_token = folder.token(config.name, Role.GATEWAY, ttl_s=TOKEN_TTL_S)
    return endpoints.dataflow, own_token, verifier.verify, node_options
