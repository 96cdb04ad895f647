# SPDX-License-Identifier: Apache-2.0
"""A call survives outages and honours Retry-After."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.contract.dataflow_server import serving

from penstock.errors import Busy, Fenced, Unreachable, WireError
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import AsyncServiceClient, ServiceClient
from penstock.wire.routes import Call, Route
from penstock.wire.server import build_app


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    text: str


@dataclass(slots=True)
class FlakyHandler:
    """Raises its next error, if any is left."""

    pending_errors: list[WireError]
    calls: int = 0

    async def echo(self, call: Call) -> Echo:
        self.calls += 1
        if self.pending_errors:
            raise self.pending_errors.pop(0)
        return call.body


@contextmanager
def flaky_service(
    folder: Path, *pending_errors: WireError
) -> Generator[tuple[FlakyHandler, str, str]]:
    handler = FlakyHandler(list(pending_errors))
    signer = Signer.create(folder, "run")
    route = Route(
        method="POST",
        path="/v1/echo",
        handler=handler.echo,
        roles=frozenset({Role.READER}),
        summary="Says it again.",
        request=Echo,
        response=Echo,
    )
    with serving(build_app([route], signer.verifier(Audience.DATAFLOW), title="flaky")) as url:
        yield handler, url, signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=60)


def test_transient_errors_are_retried(tmp_path: Path) -> None:
    trouble = [WireError("oops"), Busy("later", retry_after_s=0.3), Unreachable("not yet")]
    with flaky_service(tmp_path, *trouble) as (handler, url, token):
        caller = ServiceClient(url, token)
        started = time.monotonic()
        assert caller.call("POST", "/v1/echo", Echo(text="hi"), Echo) == Echo(text="hi")
        assert handler.calls == 4 and time.monotonic() - started >= 0.3
        caller.close()


def test_permanent_errors_are_not_retried(tmp_path: Path) -> None:
    with flaky_service(tmp_path, Fenced("you were replaced")) as (handler, url, token):
        caller = ServiceClient(url, token)
        with pytest.raises(Fenced, match="you were replaced"):
            caller.call("POST", "/v1/echo", Echo(text="hi"), Echo)
        assert handler.calls == 1
        caller.close()


async def test_a_missing_service_is_reported_after_the_deadline(tmp_path: Path) -> None:
    caller = AsyncServiceClient("http://127.0.0.1:9", "token")
    started = time.monotonic()
    with pytest.raises(Unreachable, match="check that the service is running"):
        await caller.call("POST", "/v1/echo", Echo(text="hi"), Echo, deadline_s=0.5)
    assert time.monotonic() - started < 30
    await caller.close()
