# SPDX-License-Identifier: Apache-2.0
"""`penstock forget`: a session of an agent from outside, out of all future use."""

from __future__ import annotations

from pathlib import Path

DEADLINE_S = 20.0
STATE_TEXT = {
    "running": "it was running; nothing of it will be recorded",
    "waiting": "it waited for a batch, and is in none now",
    "sealed": "it is in a sealed batch, and masked there; its payload goes with that batch",
    "trained": "it was trained already, which stays; it is masked in whatever is served again",
    "dropped": "it was dropped before, and never trained",
}


def forget(run: Path, session: str, /, *, json: bool = False) -> int:
    """Remove a session from everything that was not trained yet.

    Parameters
    ----------
    run
        The run folder, or its config file; the run must be running.
    session
        The session's id, as the gateway told it (p0-17.0.1).
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json
    from penstock.dataflow.service.operators.messages import ForgetSessionAnswer
    from penstock.runs.target import find_run_folder
    from penstock.wire.auth import Role
    from penstock.wire.client import ServiceClient

    folder = find_run_folder(run)
    token = folder.token(folder.read_config().name, Role.ADMIN, ttl_s=60.0)
    caller = ServiceClient(folder.endpoints().dataflow, token)
    try:
        path = f"/v1/sessions/{session}"
        answer = caller.call("DELETE", path, None, ForgetSessionAnswer, deadline_s=DEADLINE_S)
    finally:
        caller.close()
    if json:
        print_json({"session": answer.session, "was": answer.was})
    else:
        print(f"{answer.session} is forgotten: {STATE_TEXT[answer.was]}")
    return 0
