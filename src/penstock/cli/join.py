# SPDX-License-Identifier: Apache-2.0
"""`penstock join`: join a run as a rollout node, with only a URL and a token."""

from __future__ import annotations

import secrets
from pathlib import Path


def join(
    url: str,
    /,
    *,
    token_file: Path | None = None,
    name: str | None = None,
    capacity: int | None = None,
    engines: int | None = None,
    vllm_environment: Path | None = None,
    policies: str | None = None,
    tags: str | None = None,
    relay: str | None = None,
    relay_token_file: Path | None = None,
    serve_weights: str | None = None,
    serve_gb: float = 50.0,
    public_key: str | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    ca: Path | None = None,
) -> int:
    """Join a run as a rollout node until the run ends, or until SIGTERM or Ctrl-C.

    Args:
        url: URL of the run's dataflow; `penstock token` prints it.
        token_file: File with a rollout token, from `penstock token RUN --role rollout --out
            FILE`; by default the one that PENSTOCK_TOKEN_FILE names. Renewed tokens are written
            back to it. /dev/stdin works too.
        name: Name of this node, under the name that its token is for; by default the host name and
            four random characters.
        capacity: Number of tasks to run in parallel.
        engines: Number of inference engines per policy in this node; by default as the run says.
        vllm_environment: Virtual environment with vLLM on this machine; by default the one that
            `make setup-engine` creates.
        policies: Policies to serve, separated by commas; by default all of the run. The node gets
            only work of sources that call no others.
        tags: What this node says about itself, separated by commas: gpus=8 and cost=12.5 (per
            hour) are counted in `penstock report`.
        relay: URL of a relay to fetch weights from before the run's weight server; needs
            --relay-token-file.
        relay_token_file: File with a token for the relay, such as `penstock token RUN --for-relay
            --out FILE` writes.
        serve_weights: HOST:PORT on which this node serves weights to other nodes; off loopback only
            with TLS.
        serve_gb: Disk space for weights kept for other nodes, in GB.
        public_key: The run's public key, or a file that contains it; required by --serve-weights.
        tls_cert: TLS certificate file for --serve-weights.
        tls_key: TLS key file for --serve-weights.
        ca: File of the private authority that signed the certificates of the run's services.
    """
    import uvloop

    from penstock.cli.output import print_note
    from penstock.cli.relay_options import (
        RELAY_EXAMPLE,
        parse_sharing,
        read_public_key,
        read_relay_token,
    )
    from penstock.cli.service_options import check_url, exit_now, make_tls, require_token
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.runs.credential_upkeep import with_upkeep
    from penstock.runs.join import (
        check_reachable,
        host_name,
        node_name,
        node_state_dir,
        split_policies,
        split_tags,
    )
    from penstock.runs.service_process import add_import_paths
    from penstock.wire.denied import deny_list
    from penstock.wire.trust import refuse_clear_text, trust

    trust(ca, tls_cert, tls_key)
    refuse_clear_text(check_url(url, example="http://127.0.0.1:18080"))
    if relay is not None:
        refuse_clear_text(check_url(relay, example=RELAY_EXAMPLE))
    node_token = require_token(token_file, role="rollout")
    if relay is not None and relay_token_file is None:
        raise ConfigError(
            "no token for the relay: pass --relay-token-file FILE. On the machine that has the run "
            "folder, `penstock token RUN --for-relay --out FILE` writes one; a rollout token does "
            "not work"
        )
    node = node_name(node_token.value(), name or f"{host_name()}-{secrets.token_hex(2)}")
    tls, state_dir = make_tls(tls_cert, tls_key), node_state_dir(node)
    sharing = parse_sharing(
        serve_weights, serve_gb, state_dir, tls, lambda: read_public_key(public_key)
    )
    logs.configure(node)
    add_import_paths((str(Path.cwd()),))
    check_reachable(url, node_token)
    print_note(
        f"joining {url}: this node runs code that the run's owner chose (the workflow and the "
        "reward that the run names); join only runs whose owner you trust"
    )
    from penstock.rollout.node import run_node

    work = run_node(
        url,
        node_token,
        node_id=node,
        state_dir=state_dir,
        capacity=capacity,
        num_engines=engines,
        environment="" if vllm_environment is None else str(vllm_environment),
        policies=split_policies(policies),
        tags=split_tags(tags),
        relay=read_relay_token(relay, relay_token_file),
        sharing=sharing,
    )
    denied = None if sharing is None else deny_list(sharing.public_key, sharing.denied_file)
    uvloop.run(with_upkeep(work, node_token, urls=[url], denied=denied))
    exit_now(0)
