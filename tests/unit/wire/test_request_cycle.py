# SPDX-License-Identifier: Apache-2.0
"""The bytes of one request and its answer: how many writes, when the head leaves, how pieces of a
body arrive, and when an idle connection is closed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.server import ServerState

from penstock.wire.doors import Door, GuardedConnection
from penstock.wire.request_cycle import KNOWN_LIMIT, RequestCycle

OK = {"type": "http.response.start", "status": 200}


class Recorder(asyncio.Transport):
    """Keeps each write; a list of parts written together is one."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_paused = False
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.writes.append(b"".join(list_of_data))

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


def cycle_on(
    transport: Recorder, *, method: str = "GET", is_known: bool = False, keep_alive: bool = True
) -> RequestCycle:
    return RequestCycle(
        scope={"type": "http", "method": method},
        transport=transport,
        flow=FlowControl(transport),
        logger=logging.getLogger("test"),
        default_headers=[(b"server", b"x")],
        expects_continue=False,
        keep_alive=keep_alive,
        is_known=is_known,
        on_response=lambda: None,
    )


async def send_all(
    cycle: RequestCycle, headers: list[tuple[bytes, bytes]], *bodies: bytes, status: int = 200
) -> None:
    await cycle.send({**OK, "status": status, "headers": headers})
    for at, body in enumerate(bodies, 1):
        is_last = at == len(bodies)
        await cycle.send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def test_an_answer_of_known_length_is_one_write() -> None:
    wire = Recorder()
    await send_all(cycle_on(wire), [(b"Content-Length", b"2")], b"ok")
    assert wire.writes == [b"HTTP/1.1 200 OK\r\nserver: x\r\ncontent-length: 2\r\n\r\nok"]


async def test_the_head_of_a_stream_leaves_before_its_first_bytes() -> None:
    wire = Recorder()
    cycle = cycle_on(wire)
    await cycle.send({**OK, "headers": [(b"a", b"b")]})
    assert wire.writes == [
        b"HTTP/1.1 200 OK\r\nserver: x\r\na: b\r\ntransfer-encoding: chunked\r\n\r\n"
    ]
    await cycle.send({"type": "http.response.body", "body": b"abc", "more_body": True})
    await cycle.send({"type": "http.response.body", "body": b""})
    assert wire.writes[1:] == [b"3\r\nabc\r\n", b"0\r\n\r\n"]


@pytest.mark.parametrize("value", [b"x\r\nset-cookie: y", b"x\ny", b"x\0", b"x\x7f"])
async def test_a_value_cannot_end_its_header(value: bytes) -> None:
    wire = Recorder()
    with pytest.raises(RuntimeError, match="control characters"):
        await send_all(cycle_on(wire), [(b"content-length", b"0"), (b"a", value)], b"")
    assert not wire.writes


@pytest.mark.parametrize("size", [b"1", b"3"])
async def test_a_body_must_have_the_length_that_was_announced(size: bytes) -> None:
    with pytest.raises(RuntimeError, match="than its content-length"):
        await send_all(cycle_on(Recorder()), [(b"content-length", size)], b"ok")


async def test_answers_without_a_body_are_complete() -> None:
    head, none = Recorder(), Recorder()
    await send_all(cycle_on(head, method="HEAD"), [(b"content-length", b"2")], b"ok")
    assert head.writes == [b"HTTP/1.1 200 OK\r\nserver: x\r\ncontent-length: 2\r\n\r\n"]
    await send_all(cycle_on(none), [], b"", status=204)
    assert none.writes == [b"HTTP/1.1 204 No Content\r\nserver: x\r\n\r\n"]


async def test_a_caller_that_keeps_no_connection_is_told_and_closed() -> None:
    wire = Recorder()
    await send_all(cycle_on(wire, keep_alive=False), [(b"content-length", b"0")], b"")
    assert wire.writes[0].endswith(b"connection: close\r\n\r\n")
    assert wire.is_closed


async def test_the_service_is_woken_once_for_a_body_in_pieces() -> None:
    cycle = cycle_on(Recorder())
    waiting = asyncio.create_task(cycle.receive())
    for piece in (b"a", b"b"):
        cycle.add(piece)
        await asyncio.sleep(0)
        assert not waiting.done()
    cycle.more_body = False
    cycle.message_event.set()
    assert await waiting == {"type": "http.request", "body": b"ab", "more_body": False}


@pytest.mark.parametrize(("is_known", "limit"), [(False, HIGH_WATER_LIMIT), (True, KNOWN_LIMIT)])
async def test_a_long_body_waits_outside(is_known: bool, limit: int) -> None:
    """And the service gets what is here, so that it can be read on."""
    wire = Recorder()
    cycle = cycle_on(wire, is_known=is_known)
    cycle.add(b"x" * limit)
    assert not wire.is_paused
    cycle.add(b"y")
    assert wire.is_paused
    message = await cycle.receive()
    assert (len(message["body"]), message["more_body"]) == (limit + 1, True)
    assert not wire.is_paused


async def test_an_idle_connection_is_closed_after_its_time_and_not_before() -> None:
    """One timer serves many requests; it counts from the end of the last answer."""

    answered = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({**OK, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})
        answered.set()

    config = uvicorn.Config(cast(Any, app), timeout_keep_alive=3600, lifespan="off", ws="none")
    door = Door(max_connections=8, max_strangers=8, max_per_address=8)
    connection = GuardedConnection(config, ServerState(), {}, door=door, address="a")
    wire = Recorder()
    connection.connection_made(wire)
    look = cast(Any, connection)
    timers: set[int] = set()
    for _ in range(3):
        connection.data_received(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await answered.wait()
        answered.clear()
        timers.add(id(look._idle_timer))
    assert len(timers) == 1 and not look._idle_timer.cancelled()
    look._close_if_idle()
    assert not wire.is_closed, "the last answer was just now"
    look._idle_timer.cancel()
    look._since -= 3601
    look._close_if_idle()
    assert wire.is_closed
    connection.connection_lost(None)
