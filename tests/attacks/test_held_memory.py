# SPDX-License-Identifier: Apache-2.0
"""What one credential makes a service keep in memory: bodies that never end, and answers that
nobody reads, over as many connections as it likes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

from starlette.applications import Starlette

from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.call_budget import MAX_BYTES
from penstock.wire.routes import Call, Health, RawResponse, Route
from penstock.wire.server import SMALL_ANSWER_BYTES, build_app

PIECE = bytes(1 << 20)
NUM_PIECES = 31
NUM_CALLS = 50
TURNS = 200
LARGE = RawResponse(bytes(SMALL_ANSWER_BYTES + 1))


class Service:
    """Routes as readers have them: one takes large bodies, the other gives large answers."""

    def __init__(self, folder: Path) -> None:
        self.signer = Signer.create(folder, "run")
        self.num_answering = 0
        self.app: Starlette = build_app(
            [
                self._route("PUT", self._record, request=bytes, max_body_bytes=32 << 20),
                self._route("GET", self._get, shares_budget=True),
            ],
            self.signer.verifier(Audience.DATAFLOW),
            title="test",
        )

    def _route(self, method: str, handler: Any, **options: Any) -> Route:
        roles = frozenset({Role.READER})
        return Route(method=method, path="/x", handler=handler, roles=roles, summary="x", **options)

    async def _record(self, call: Call) -> object:
        return Health()

    async def _get(self, call: Call) -> object:
        self.num_answering += 1
        return LARGE

    def scope(self, method: str, subject: str) -> dict[str, Any]:
        token = self.signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=600, subject=subject)
        headers = [(b"authorization", f"Bearer {token}".encode())]
        found = {"type": "http", "method": method, "path": "/x", "raw_path": b"/x"}
        return found | {"query_string": b"", "headers": headers}


async def no_answer(message: Any) -> None:
    pass


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_bodies_of_one_credential_are_read_within_its_budget(tmp_path: Path) -> None:
    """A body that stops before its end was kept for hours: its average rate was high enough. No
    route is an exception, and another credential is answered meanwhile."""
    service, stop, taken = Service(tmp_path), asyncio.Event(), {"greedy": 0, "other": 0}

    async def call(subject: str) -> None:
        num_pieces = 0

        async def receive() -> dict[str, Any]:
            nonlocal num_pieces
            if num_pieces == NUM_PIECES:
                await stop.wait()
                return {"type": "http.disconnect"}
            num_pieces += 1
            taken[subject] += len(PIECE)
            return {"type": "http.request", "body": PIECE, "more_body": True}

        await service.app(service.scope("PUT", subject), cast(Any, receive), no_answer)

    calls = [asyncio.create_task(call("greedy")) for _ in range(NUM_CALLS)]
    await turns()
    assert 0 < taken["greedy"] <= MAX_BYTES
    calls.append(asyncio.create_task(call("other")))
    await turns()
    assert taken["other"] == NUM_PIECES * len(PIECE)
    stop.set()
    await asyncio.gather(*calls)
    assert taken["greedy"] == NUM_CALLS * NUM_PIECES * len(PIECE), "all had their turn"


async def test_answers_that_are_not_read_count_in_the_budget(tmp_path: Path) -> None:
    """They are in memory until the caller reads them, or is cut off after a minute."""
    service, is_read = Service(tmp_path), asyncio.Event()

    async def call(subject: str) -> None:
        num_parts = 0

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal num_parts
            num_parts += message["type"] == "http.response.body"
            if num_parts == 2:  # a connection waits here until there is room behind the first
                await is_read.wait()

        await service.app(service.scope("GET", subject), cast(Any, receive), send)

    calls = [asyncio.create_task(call("greedy")) for _ in range(4 * NUM_CALLS)]
    await turns()
    assert 0 < service.num_answering <= MAX_BYTES >> 20
    before = service.num_answering
    calls.append(asyncio.create_task(call("other")))
    await turns()
    assert service.num_answering == before + 1
    is_read.set()
    await asyncio.gather(*calls)
    assert service.num_answering == 4 * NUM_CALLS + 1, "all had their turn"
