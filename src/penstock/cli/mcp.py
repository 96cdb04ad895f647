# SPDX-License-Identifier: Apache-2.0
"""`penstock mcp`: an MCP server through which an agent watches and operates one run."""

from __future__ import annotations

from pathlib import Path


def mcp(
    run: Path,
    /,
    *,
    token_file: Path | None = None,
    http: bool = False,
    host: str = "127.0.0.1",
    port: int = 8766,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    json: bool = False,
) -> int:
    """Serve a run's tools to an agent: status, report, explain, samples; with a token of role admin
    also scale, drain, tag and fork. Every action takes a reason and is logged with its caller.

    Serves standard input and output until they end, or with --http until a signal. Over HTTP each
    request carries its own token, of role reader or admin.

    Args:
        run: Run folder, or its config file; running, stopped or finished.
        token_file: File with the agent's token, for standard streams. Without it, the agent only
            reads.
        http: Serve HTTP instead of standard streams.
        host: Address to listen on; off loopback only with TLS.
        port: Port to listen on; 0 picks a free one.
        tls_cert: TLS certificate file.
        tls_key: TLS key file.
        json: Print the URL as a JSON object.
    """
    import uvloop

    from penstock.cli.output import print_json, print_text
    from penstock.cli.service_options import make_tls
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.runs.target import find_run_folder
    from penstock.wire.auth import Audience, Verifier
    from penstock.wire.held_token import HeldToken

    if http and token_file is not None:
        raise ConfigError(
            "--token-file is for standard streams; over HTTP each request has a token"
        )
    logs.configure("mcp", level="warning")
    try:
        from penstock.runs.mcp_server import OperatorServer
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; run: pip install 'penstock-rl[tools]'"
        ) from None
    folder = find_run_folder(run)
    verifier = Verifier.read(folder.keys, run=folder.read_config().name, audience=Audience.DATAFLOW)
    token = None if token_file is None else HeldToken.from_file(token_file.absolute())
    served = OperatorServer(folder=folder, verifier=verifier, token=token)

    def announce(url: str) -> None:
        if json:
            print_json({"url": url})
        else:
            print_text(f"serving {folder.path} at {url} (Ctrl-C to stop)")

    if http:
        uvloop.run(served.serve_http(host, port, make_tls(tls_cert, tls_key), announce))
    else:
        uvloop.run(served.serve_stdio())
    return 0
