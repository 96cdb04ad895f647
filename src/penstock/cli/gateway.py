# SPDX-License-Identifier: Apache-2.0
"""`penstock gateway`: serve external agents and train on their sessions."""

from __future__ import annotations

import secrets
import socket
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.rollout.node import NodeOptions
    from penstock.types import NodeId
    from penstock.wire.auth import Verifier
    from penstock.wire.held_token import HeldToken

BACKLOG = 1024


def gateway(
    where: str,
    /,
    *,
    port: int,
    host: str = "127.0.0.1",
    token_file: Path | None = None,
    public_key: str | None = None,
    name: str | None = None,
    policy: str | None = None,
    capacity: int | None = None,
    engines: int = 1,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    ca: Path | None = None,
) -> int:
    """Serve external agents until SIGTERM or Ctrl-C, also after the run has ended.

    Args:
        where: Run folder, its config file, or the URL of its dataflow.
        port: Port to listen on.
        host: Address to listen on; off loopback only with TLS.
        token_file: With a URL: file with a gateway token, from `penstock token RUN --role gateway
            --out FILE`; by default the one that PENSTOCK_TOKEN_FILE names. Renewed tokens are
            written back to it. /dev/stdin works too.
        public_key: The run's public key, or a file that contains it, with a URL; `penstock token
            RUN --role gateway` prints it.
        name: Name of this gateway in the run, with a URL under the name that its token is for; by
            default the host name and four random characters.
        policy: Policy whose engine settings to use, with a run folder; optional if the run has only
            one.
        capacity: Maximum number of sessions to record in parallel.
        engines: Number of inference engines per policy, with a URL; a run folder has its own
            setting.
        tls_cert: TLS certificate file; required off loopback.
        tls_key: TLS key file.
        ca: File of the private authority that signed the certificates of the run's services.
    """
    import uvloop

    from penstock.cli.output import print_note
    from penstock.cli.relay_options import read_public_key
    from penstock.cli.service_options import exit_now, listen_address, make_tls, require_token
    from penstock.observe import logs
    from penstock.runs.credential_upkeep import with_upkeep
    from penstock.runs.join import host_name, node_name, node_state_dir
    from penstock.types import NodeId
    from penstock.wire.auth import Audience, Verifier
    from penstock.wire.serving import require_tls_off_loopback
    from penstock.wire.trust import refuse_clear_text, trust

    tls = make_tls(tls_cert, tls_key)
    trust(ca, tls_cert, tls_key)
    require_tls_off_loopback(host, tls)
    node = NodeId(name or f"gateway-{host_name()}-{secrets.token_hex(2)}")
    bind = listen_address("", host, port)
    if where.startswith(("http://", "https://")):
        refuse_clear_text(where)
        url, own_token = where, require_token(token_file, role="gateway")
        node = node_name(own_token.value(), node)
        state_dir = node_state_dir(node)
        verifier = Verifier.from_token(
            own_token.value(),
            read_public_key(public_key),
            audience=Audience.GATEWAY,
            denied_file=state_dir / "denied",
        )
        node_options: NodeOptions = {"state_dir": state_dir, "num_engines": engines}
        denied = verifier.denied
    else:
        url, own_token, verifier, node_options = _join_by_folder(Path(where), node, policy)
        denied = None  # it reads the run's own file
    logs.configure(node)
    listener = socket.create_server(bind, backlog=BACKLOG)
    scheme = "http" if tls is None else "https"
    base_url = f"{scheme}://{host}:{listener.getsockname()[1]}/v1"
    print_note(
        f"agents connect with base_url {base_url} and, as api_key, a token from `penstock token "
        "RUN --role session`"
    )
    from penstock.rollout.online import run_online

    work = run_online(
        url,
        own_token,
        verifier,
        node_id=node,
        listener=listener,
        tls=tls,
        capacity=capacity,
        **node_options,
    )
    uvloop.run(with_upkeep(work, own_token, urls=[url], denied=denied))
    exit_now(0)


def _join_by_folder(
    run: Path, node: NodeId, policy: str | None
) -> tuple[str, HeldToken, Verifier, NodeOptions]:
    from penstock.runs.join import local_node_options
    from penstock.runs.service_process import resolve_policy, service_token
    from penstock.runs.target import find_run_folder
    from penstock.types import subject_of_node
    from penstock.wire.auth import Audience, Role, Verifier

    folder = find_run_folder(run)
    config, endpoints = folder.read_config(), folder.trusted_endpoints()
    named = resolve_policy(config, policy)
    verifier = Verifier.read(folder.keys, run=config.name, audience=Audience.GATEWAY)
    node_options = local_node_options(folder, config, named, node)
    node_options["policies"] = ()  # agents may call any policy
    subject = subject_of_node(node)
    own_token = service_token(folder, config.name, Role.GATEWAY, subject=subject)
    return endpoints.dataflow, own_token, verifier, node_options
