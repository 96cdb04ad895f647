# SPDX-License-Identifier: Apache-2.0
"""`penstock tools`: the built-in tools as an MCP server, for workflows and any other MCP client."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def serve(
    *,
    python: bool = False,
    search: Path | None = None,
    files: Path | None = None,
    stdio: bool = False,
    host: str = "127.0.0.1",
    port: int = 8765,
    timeout_s: float = 60.0,
    max_result_chars: int = 8000,
    backend: Literal["auto", "bubblewrap", "runsc", "none"] = "auto",
    json: bool = False,
) -> int:
    """Serve tools over MCP until a signal, or with --stdio until the end of standard input.

    Args:
        python: Offer `python`, which runs code in a sandbox. Each MCP session has its own
            variables.
        search: Offer `search` over the .txt, .md and .jsonl files of this folder.
        files: Offer `list_files`, `read_file` and `write_file` within this folder.
        stdio: Serve standard input and output instead of HTTP.
        host: Address to listen on; only of this machine.
        port: Port to listen on; 0 picks a free one.
        timeout_s: Time limit of one call, in seconds.
        max_result_chars: Most characters of a result.
        backend: What isolates `python`. none runs it as an ordinary process: choose it only where
            this server is itself in a sandbox.
        json: Print the URL as a JSON object.
    """
    import uvloop

    from penstock import __version__
    from penstock.errors import ConfigError
    from penstock.observe import logs

    if not python and search is None and files is None:
        raise ConfigError("nothing to serve; pass --python, --search FOLDER or --files FOLDER")
    logs.configure("tools", level="warning")
    try:
        from penstock.rollout.tools.mcp_server import BuiltinTools, McpToolServer, open_builtin
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error.name} is not installed; run: pip install 'penstock-rl[tools]'"
        ) from None
    from penstock.rollout.isolation import Isolation, IsolationSettings

    offered = BuiltinTools(
        python=python,
        search=search,
        files=files,
        timeout_s=timeout_s,
        max_result_chars=max_result_chars,
    )

    async def run() -> None:
        isolation = Isolation(IsolationSettings(backend=backend))
        server = McpToolServer(await open_builtin(offered, isolation), __version__)
        if stdio:
            await server.serve_stdio()
        else:
            await server.serve_http(host, port, announce)

    def announce(url: str) -> None:
        from penstock.cli.output import print_json

        if json:
            print_json({"url": url})
        else:
            print(f"serving tools at {url} (Ctrl-C to stop)", flush=True)

    uvloop.run(run())
    return 0
