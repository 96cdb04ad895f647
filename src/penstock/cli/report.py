# SPDX-License-Identifier: Apache-2.0
"""`penstock report`: is the rollout pool too small, too large, or right?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.dataflow.report.shape import BalanceReport
    from penstock.fleet.run_folder import RunFolder


def report(run: Path, /, *, json: bool = False) -> int:
    """Show how trainers and rollout nodes keep pace, and what everybody did with their time.

    Parameters
    ----------
    run
        The run folder, or its config file.
    json
        Print the report as one JSON object, the last line; its schema is published with the
        documentation.
    """
    from penstock.cli.output import print_json
    from penstock.errors import WireError
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    pid = folder.launcher_pid()
    if pid is None:
        raise WireError(f"{folder.path} is not running; `penstock run {run}` resumes it")
    try:
        answer = _fetch_report(folder)
    except WireError as error:
        raise WireError(f"running (pid {pid}), but its dataflow gives no report: {error}") from None
    if json:
        print_json(answer)
    else:
        from penstock.dataflow.report.text import render

        print(render(answer))
    return 0


def _fetch_report(folder: RunFolder) -> BalanceReport:
    from penstock.dataflow.client.dataflow import StatusClient
    from penstock.wire.auth import Role

    token = folder.token(folder.read_config().name, Role.READER, ttl_s=60.0)
    client = StatusClient(folder.endpoints().dataflow, token)
    try:
        return client.report()
    finally:
        client.close()
