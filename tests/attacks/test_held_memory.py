# SPDX-License-Identifier: Apache-2.0
"""What one credential makes a service keep in memory: bodies that never end, and answers that
nobody reads, over as many connections as it likes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from blake3 import blake3
from starlette.applications import Starlette
from tests.attacks.in_process import dataflow_door
from tests.sim.reader_world import rollout_row

from penstock.dataflow.core.completion import ColumnCompleted, Completion, RequiredColumns
from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy
from penstock.dataflow.core.messages import GroupEnded, ToCoordinator
from penstock.types import GroupId, PolicyName, RowId
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.call_budget import CALL_BYTES, MAX_BYTES
from penstock.wire.routes import Call, Health, RawResponse, Route
from penstock.wire.server import SMALL_ANSWER_BYTES, build_app

PIECE = bytes(1 << 20)
NUM_PIECES = 31
NUM_CALLS = 50
TURNS = 200
LARGE = RawResponse(bytes(SMALL_ANSWER_BYTES + 1))
MAX_DOWNLOADS = MAX_BYTES // CALL_BYTES
HUGE = RawResponse(bytes(16 << 20))


class Service:
    """Routes as readers have them: one takes large bodies, the other gives large answers."""

    def __init__(self, folder: Path) -> None:
        self.signer = Signer.create(folder, "run")
        self.num_answering = 0
        self.app: Starlette = build_app(
            [
                self._route("PUT", self._record, request=bytes, max_body_bytes=32 << 20),
                self._route("GET", self._get, shares_budget=True),
                self._route("POST", self._huge, shares_budget=True),
                self._route("DELETE", self._huge, shares_budget=True, answer_bytes=len(HUGE.body)),
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

    async def _huge(self, call: Call) -> object:
        self.num_answering += 1
        await asyncio.sleep(0)
        return HUGE

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


@pytest.mark.parametrize("method", ["POST", "DELETE"])
async def test_answers_count_with_their_size(tmp_path: Path, method: str) -> None:
    """A question of 12 KB counted as 1 MB, and its answer was 32 MB. Where a route says how long
    its answers may be, calls wait for them; elsewhere what has no room is refused."""
    service, is_read, statuses, num_held = Service(tmp_path), asyncio.Event(), list[int](), 0

    async def call(subject: str) -> None:
        has_body = False

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Any) -> None:
            nonlocal has_body, num_held
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
                return
            if has_body:
                await is_read.wait()
            elif len(message["body"]) > SMALL_ANSWER_BYTES:
                has_body, num_held = True, num_held + len(message["body"])

        await service.app(service.scope(method, subject), cast(Any, receive), send)

    calls = [asyncio.create_task(call("greedy")) for _ in range(NUM_CALLS)]
    await turns()
    assert 0 < num_held <= MAX_BYTES
    before = num_held
    calls.append(asyncio.create_task(call("other")))
    await turns()
    assert num_held == before + len(HUGE.body)
    is_read.set()
    await asyncio.gather(*calls)
    if method == "DELETE":
        assert statuses == [200] * (NUM_CALLS + 1), "all had their turn"
    else:
        assert set(statuses) == {200, 429}


async def test_downloads_of_one_credential_have_few_files_open(tmp_path: Path) -> None:
    """Each has a descriptor and a buffer until the caller has read it, or is cut off."""
    data, num_started = bytes(1 << 20), 0
    is_read, are_started = asyncio.Event(), asyncio.Event()
    digest = blake3(data).hexdigest()
    async with dataflow_door(tmp_path) as door:
        path = f"/v1/blobs/{digest}"
        await door.call("PUT", f"{path}?size={len(data)}", Role.ROLLOUT, content=data)
        headers = [(b"authorization", f"Bearer {door.token(Role.ROLLOUT)}".encode())]
        scope = {"type": "http", "method": "GET", "path": path, "raw_path": path.encode()}

        async def receive() -> dict[str, Any]:
            await is_read.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            nonlocal num_started
            num_started += message["type"] == "http.response.start"
            if num_started == MAX_DOWNLOADS:
                are_started.set()
            await is_read.wait()

        def call() -> Any:
            fields = {"query_string": b"", "headers": headers}
            return door.app({**scope, **fields}, cast(Any, receive), send)

        calls = [asyncio.create_task(call()) for _ in range(2 * MAX_DOWNLOADS)]
        await are_started.wait()
        await turns()
        assert num_started == MAX_DOWNLOADS
        is_read.set()
        await asyncio.gather(*calls)
        assert num_started == 2 * MAX_DOWNLOADS, "all had their turn"


class HeldColumns:
    """Two groups of a run whose policy needs `score`: `p0-1` is open, `p0-2` was freed."""

    def __init__(self, need: RequiredColumns) -> None:
        self.sent: list[ToCoordinator] = []
        closing = ClosingPolicy(kind=ClosingKind.COMPLETE)
        needs = {PolicyName("main"): need}
        self.completion = Completion(needs, closing, lambda record: None, self.sent.append)
        self.open_groups = {GroupId("p0-1")}

    def write(self, row_id: str, *names: str) -> None:
        events = (
            ColumnCompleted(row_id=RowId(row_id), name=name, failed="", value=1.0, digest="")
            for name in names
        )
        self.completion.completed(events, self.open_groups, 1.0)

    def end(self) -> None:
        self.open_groups.clear()
        row = rollout_row(RowId("p0-1.0.1"), 1, 1.0, None).summary
        self.completion.report(GroupEnded(group_id=GroupId("p0-1"), policies=(), rows=(row,)), 1.0)

    @property
    def num_held(self) -> int:
        return sum(map(len, self.completion._completed.values()))  # pyright: ignore[reportPrivateUsage]


def test_only_columns_that_a_policy_waits_for_are_held() -> None:
    """Each column of each row was, for ever: 25 MB for a call of 1 MB of a stage."""
    nothing = HeldColumns(RequiredColumns())
    nothing.write("p0-1.0.1", "score")
    assert not nothing.num_held
    held = HeldColumns(RequiredColumns(judge=frozenset({"score"})))
    for number in range(10):
        held.write("p0-1.0.1", f"score@{number}", "other")
        held.write("p0-2.0.1", "score")
    assert not held.num_held
    held.write("p0-1.0.1", "score")
    held.end()
    [report] = held.sent
    assert report.rows[0].values == {"score": 1.0}, "written before the group ended"
    held.completion.forget([GroupId("p0-1")])
    held.write("p0-1.0.1", "score")
    assert not held.num_held
