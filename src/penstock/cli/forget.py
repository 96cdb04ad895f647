# SPDX-License-Identifier: Apache-2.0
"""`penstock forget`: exclude an external agent's session from future training."""

from __future__ import annotations

from pathlib import Path

STATE_TEXT = {
    "running": "it was still running and will not be recorded",
    "waiting": "it was waiting for a batch and will not enter one",
    "sealed": "it is masked in the sealed batch that has it; its payload is deleted with the batch",
    "trained": "it was already trained on, which cannot be undone; it is masked in any later use",
    "dropped": "it had already been dropped and was never trained on",
}


def forget(run: Path, session: str, /, *, json: bool = False) -> int:
    """Exclude a session from everything that has not been trained yet.

    Args:
        run: Run folder, or its config file; the run must be running.
        session: Session id, as returned by the gateway (p0-17.0.1).
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.runs.control import forget_session
    from penstock.runs.target import find_run_folder

    answer = forget_session(find_run_folder(run), session)
    if json:
        print_json({"session": answer.session, "was": answer.was})
    else:
        print_text(f"forgot {answer.session}: {STATE_TEXT[answer.was]}")
    return 0
