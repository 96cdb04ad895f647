# SPDX-License-Identifier: Apache-2.0
"""`penstock conformance`: test a third-party node or trainer against the protocol."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
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
    from penstock.conformance import conformance_rollout

    return _run(conformance_rollout, host, port, timeout_s, json=json)


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
    from penstock.conformance import conformance_trainer

    return _run(conformance_trainer, host, port, timeout_s, json=json)


def _run(
    examine: Callable[..., Coroutine[Any, Any, bool]],
    host: str,
    port: int,
    timeout_s: float,
    *,
    json: bool,
) -> int:
    import uvloop

    from penstock.cli.service_options import listen_address
    from penstock.observe import logs

    listen_address("", host, port)
    logs.configure("conformance", level="warning")
    out = partial(print, flush=True)
    passed = uvloop.run(examine(host=host, port=port, out=out, timeout_s=timeout_s, json=json))
    return 0 if passed else 1
