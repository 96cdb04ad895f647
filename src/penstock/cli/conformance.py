# SPDX-License-Identifier: Apache-2.0
"""`penstock conformance`: test a third-party node or trainer against the protocol."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from typing import Any


def rollout(
    *, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 60.0, json: bool = False
) -> int:
    """Start a test dataflow that a rollout node joins; prints one line per rule of the protocol.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        timeout_s: Time limit for the test, in seconds.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.service_options import listen_address
    from penstock.conformance import conformance_rollout

    listen_address("", host, port)
    return _run(
        conformance_rollout(host=host, port=port, out=_print_line, timeout_s=timeout_s, json=json)
    )


def trainer(
    *, host: str = "127.0.0.1", port: int = 0, timeout_s: float = 60.0, json: bool = False
) -> int:
    """Start a test dataflow that a trainer joins; prints one line per rule of the protocol.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 picks a free one.
        timeout_s: Time limit for the test, in seconds.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.service_options import listen_address
    from penstock.conformance import conformance_trainer

    listen_address("", host, port)
    return _run(
        conformance_trainer(host=host, port=port, out=_print_line, timeout_s=timeout_s, json=json)
    )


def _run(examination: Coroutine[Any, Any, bool]) -> int:
    import uvloop

    from penstock.observe import logs

    logs.configure("conformance", level="warning")
    return 0 if uvloop.run(examination) else 1


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
