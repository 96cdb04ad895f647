# SPDX-License-Identifier: Apache-2.0
"""`penstock dashboard`: runs in a browser."""

from __future__ import annotations

from pathlib import Path


def dashboard(
    *runs: Path,
    host: str = "127.0.0.1",
    port: int = 0,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    json: bool = False,
) -> int:
    """Show runs in a browser, running or ended, until Ctrl-C; reads only.

    The address that is printed contains a token of this dashboard, which can read and nothing else.

    Args:
        runs: Run folders, or their config files.
        host: Address to listen on; off loopback only with TLS.
        port: Port to listen on; 0 chooses a free one.
        tls_cert: TLS certificate file; required off loopback.
        tls_key: TLS key file.
        json: Print the address as one JSON object.
    """
    import uvloop

    from penstock.cli.output import print_json, print_note, print_text
    from penstock.cli.service_options import make_tls
    from penstock.dashboard.serving import open_dashboard
    from penstock.errors import ConfigError
    from penstock.observe import logs
    from penstock.runs.target import find_run_folder

    if not runs:
        raise ConfigError("name at least one run: `penstock dashboard OUTPUT_DIR/NAME`")
    tls = make_tls(tls_cert, tls_key)
    logs.configure("dashboard")
    folders = [find_run_folder(run) for run in runs]
    with open_dashboard(folders, host, port, tls) as opened:
        if json:
            print_json({"url": opened.url})
        else:
            print_text(opened.url)
            print_note("open it in a browser; Ctrl-C ends it, and leaves the runs alone")
        uvloop.run(opened.serve())
    return 0
