# SPDX-License-Identifier: Apache-2.0
"""Callers without a credential: silent, slow, many, or with more headers than they should have."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from concurrent.futures import Future
from pathlib import Path
from queue import Queue
from typing import Any, cast
from urllib.parse import urlsplit

import pytest
from tests.contract.dataflow_server import serving

from penstock.wire import doors
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.certificates import Authority
from penstock.wire.doors import Door, GuardedConnection
from penstock.wire.lobby import Lobby, WaitingCaller
from penstock.wire.routes import Call, Health, RawResponse, Route
from penstock.wire.server import build_app

HEAD = b"GET /v1/secret HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/secret HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
PATIENCE_S = 60.0
LARGE_BYTES = 48 << 20
"""More than kernels keep for both ends."""
PART_BYTES = 8 << 20


class Service:
    """One route that needs a token, served over a real socket."""

    def __init__(self, folder: Path) -> None:
        signer = Signer.create(folder, "run")
        self.token = signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=600, subject="me")

        async def answer(call: Call) -> object:
            return Health()

        async def answer_much(call: Call) -> object:
            return RawResponse(bytes(LARGE_BYTES))

        async def poll(call: Call) -> object:
            self.is_polled.set()
            while not await call.is_disconnected():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            return Health()

        self.is_polled = threading.Event()
        common = {"path": "/v1/secret", "roles": frozenset({Role.READER}), "summary": "x"}
        routes = [
            Route(method="GET", handler=answer_much, **cast(Any, {**common, "path": "/v1/large"})),
            Route(method="GET", handler=poll, **cast(Any, {**common, "path": "/v1/poll"})),
            Route(method="GET", handler=answer, **cast(Any, common)),
            Route(method="POST", handler=answer, request=dict[str, Any], **cast(Any, common)),
        ]
        self.app = build_app(routes, signer.verifier(Audience.DATAFLOW), title="test")
        self.address: tuple[str, int] = ("127.0.0.1", 0)

    @property
    def authorization(self) -> bytes:
        return b"authorization: Bearer " + self.token.encode() + b"\r\n"

    def connect(self, source: str = "127.0.0.1") -> socket.socket:
        caller = socket.create_connection(self.address, PATIENCE_S, source_address=(source, 0))
        caller.settimeout(PATIENCE_S)
        return caller

    def answers(self, caller: socket.socket, *, head: bytes = HEAD) -> bool:
        caller.sendall(head + self.authorization + b"\r\n")
        return one_answer(caller).startswith(b"HTTP/1.1 200")


@contextlib.contextmanager
def running(folder: Path) -> Generator[Service]:
    service = Service(folder)
    with serving(service.app) as url:
        service.address = (str(urlsplit(url).hostname), urlsplit(url).port or 0)
        yield service


def one_answer(caller: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"}"):
        more = caller.recv(1 << 16)
        if not more:
            return b""
        found += more
    return found


def everything(caller: socket.socket) -> bytes:
    """All that the service sends until it closes the connection; a TimeoutError if it does not."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while more := caller.recv(1 << 16):
            found += more
    return found


@pytest.mark.finding(6)
def test_a_credential_in_a_trailer_counts_for_nothing(tmp_path: Path) -> None:
    """Authorization after the body does not authorise."""
    with running(tmp_path) as service, service.connect() as caller:
        caller.sendall(
            POST + b"transfer-encoding: chunked\r\n\r\n"
            b"2\r\n{}\r\n0\r\n" + service.authorization + b"\r\n"
        )
        answer = everything(caller)
    assert b" 200 " not in answer and (b" 400 " in answer or b" 401 " in answer)


ENDLESS = {
    "many trailers": (b"2\r\n{}\r\n0\r\n", b"x-more: " + b"y" * 1000 + b"\r\n"),
    "one trailer": (b"2\r\n{}\r\n0\r\nx-long: ", b"y" * 1000),
    "a chunk extension": (b"2;", b"y" * 1000),
}


@pytest.mark.finding(6)
@pytest.mark.parametrize("kind", ENDLESS)
def test_nothing_beside_the_body_grows_without_limit(tmp_path: Path, kind: str) -> None:
    """Trailers and chunk extensions are within the limit of the headers."""
    begin, more = ENDLESS[kind]
    with running(tmp_path) as service, service.connect() as caller:
        caller.sendall(POST + service.authorization + b"transfer-encoding: chunked\r\n\r\n" + begin)
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 * doors.MAX_HEADER_BYTES:
                caller.sendall(more)
                sent += len(more)
            everything(caller)
        assert sent < 64 * doors.MAX_HEADER_BYTES, "the service read all of it"


def test_a_chunked_body_without_trailers_is_accepted(tmp_path: Path) -> None:
    """The refusal of trailers costs no honest caller anything."""
    with running(tmp_path) as service, service.connect() as caller:
        for _ in range(2):
            caller.sendall(POST + service.authorization + b"transfer-encoding: chunked\r\n\r\n")
            caller.sendall(b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n")
            assert one_answer(caller).startswith(b"HTTP/1.1 200")


SMALL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (700, 700))
sys.argv = ["x"]
from pathlib import Path
import uvloop
from penstock.wire.auth import Audience, Signer
from penstock.wire.server import build_app
from penstock.wire.serving import serve
app = build_app([], Signer.create(Path(FOLDER), "run").verifier(Audience.DATAFLOW), title="t")
uvloop.run(serve(app, "127.0.0.1", PORT))
"""


@pytest.mark.alone
@pytest.mark.finding(7)
def test_silent_sockets_stop_no_service(tmp_path: Path) -> None:
    """A service with few descriptors still answers while more sockets than it has stay silent."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = SMALL.replace("FOLDER", repr(str(tmp_path))).replace("PORT", str(port))
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        with contextlib.ExitStack() as stack:
            _wait_for(port)
            for number in range(1500):
                source = f"127.0.0.{2 + number % 20}"
                silent = socket.socket()
                stack.enter_context(silent)
                silent.settimeout(PATIENCE_S)
                silent.bind((source, 0))
                silent.connect(("127.0.0.1", port))
            for _ in range(20):
                assert _is_healthy(port)
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            if _is_healthy(port):
                return
        except OSError:
            assert time.monotonic() < deadline, "the service did not start"
            time.sleep(0.05)


def _is_healthy(port: int) -> bool:
    with socket.create_connection(("127.0.0.1", port), PATIENCE_S) as caller:
        caller.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        return caller.recv(4096).startswith(b"HTTP/1.1 200")


def test_strangers_never_displace_a_known_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller with a credential keeps its connection while strangers come and go, and a new
    healthy caller gets in."""
    monkeypatch.setattr(doors, "MAX_STRANGERS", 8)
    monkeypatch.setattr(doors, "MAX_STRANGERS_PER_ADDRESS", 4)
    with running(tmp_path) as service, contextlib.ExitStack() as stack:
        known = stack.enter_context(service.connect())
        assert service.answers(known)
        for number in range(100):
            stack.enter_context(service.connect(f"127.0.0.{2 + number % 10}"))
        assert service.answers(known)
        with service.connect("127.0.0.200") as newcomer:
            assert service.answers(newcomer)
        assert service.answers(known)


SLOW = {
    "says nothing": (b"", b""),
    "drips its headers": (HEAD, b"x: y\r\n"),
    "drips its body": (POST + b"content-length: 1000000\r\n\r\n", b"x"),
    "drips chunks": (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
}


@pytest.mark.finding(7)
@pytest.mark.parametrize(
    ("kind", "is_known"),
    [(kind, False) for kind in SLOW] + [(kind, True) for kind in SLOW if kind != "says nothing"],
)
def test_slow_callers_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_known: bool
) -> None:
    """Headers and bodies have a deadline, with a credential and without one."""
    for name, value in (("HEAD_S", 0.3), ("BODY_GRACE_S", 0.3), ("SWEEP_S", 0.05)):
        monkeypatch.setattr(doors, name, value)
    begin, more = SLOW[kind]
    with running(tmp_path) as service, service.connect() as caller:
        head = begin.replace(b"host: x\r\n", b"host: x\r\n" + service.authorization * is_known)
        caller.sendall(head)
        deadline = time.monotonic() + PATIENCE_S
        caller.settimeout(0.05)
        while time.monotonic() < deadline:
            try:
                if more:
                    caller.sendall(more)
                if not caller.recv(1 << 16):
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    pytest.fail("the service waited for ever")


def test_a_stranger_that_was_refused_before_its_body_came_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is idle again once its body is complete, and a silent stranger has a deadline."""
    for name, value in (("HEAD_S", 0.3), ("SWEEP_S", 0.05)):
        monkeypatch.setattr(doors, name, value)
    with running(tmp_path) as service, service.connect() as caller:
        caller.sendall(POST + b"content-length: 2\r\n\r\n")
        assert b" 401 " in one_answer(caller)
        caller.sendall(b"{}")
        assert everything(caller) == b""  # a connection that stays open ends in a TimeoutError


def test_requests_without_end_are_not_queued(tmp_path: Path) -> None:
    """A stranger sends requests and reads no answer: each that waits would cost memory."""
    with running(tmp_path) as service, service.connect() as caller:
        caller.sendall(b"GET /v1/secret HTTP/1.1\r\nhost: x\r\n\r\n" * 500)
        assert b" 400 " in everything(caller)
    with running(tmp_path / "2") as service, service.connect() as caller:
        caller.sendall(b"GET /v1/secret HTTP/1.1\r\nhost: x\r\n\r\n" * 10)
        found = b""
        while found.count(b" 401 ") < 10:
            found += caller.recv(1 << 16)
        assert b" 400 " not in found, "a few are answered in order"


def test_drips_of_a_stranger_wake_the_service_at_its_own_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked at once, and again at the next look; the calls of others are answered
    meanwhile."""
    num_looks: dict[int, int] = {}
    look = Lobby.look

    def counted(lobby: Lobby, caller: WaitingCaller) -> None:
        num_looks[id(caller)] = num_looks.get(id(caller), 0) + 1
        look(lobby, caller)

    monkeypatch.setattr(Lobby, "look", counted)
    monkeypatch.setattr(doors, "SWEEP_S", 3600.0)
    with running(tmp_path) as service, service.connect() as dripping, service.connect() as known:
        dripping.sendall(HEAD)
        while not num_looks:
            time.sleep(0.001)
        for _ in range(50):
            dripping.sendall(b"x: y\r\n")
            assert service.answers(known)
        assert [*num_looks.values()] == [1, 1]


def test_a_stranger_that_was_heard_drips_at_the_pace_of_the_service_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One refused request does not make it known: its next one is read at the next look."""
    num_reads: dict[int, int] = {}
    read = GuardedConnection.data_received

    def counted(connection: GuardedConnection, data: bytes) -> None:
        num_reads[id(connection)] = num_reads.get(id(connection), 0) + 1
        read(connection, data)

    monkeypatch.setattr(GuardedConnection, "data_received", counted)
    monkeypatch.setattr(doors, "SWEEP_S", 3600.0)
    with running(tmp_path) as service, service.connect() as dripping, service.connect() as known:
        dripping.sendall(HEAD + b"\r\n")
        assert b" 401 " in one_answer(dripping)
        dripping.sendall(HEAD)
        while num_reads != {**num_reads, next(iter(num_reads)): 2}:
            time.sleep(0.001)
        for _ in range(50):
            dripping.sendall(b"x: y\r\n")
            assert service.answers(known)
        assert sorted(num_reads.values()) == [2, 50]


def test_silent_and_slow_strangers_are_sockets_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No parser, no buffer and no task before a whole request is here; what is not HTTP is refused
    at once."""
    made: list[str] = []
    make = GuardedConnection.__init__

    def counted(connection: GuardedConnection, *args: Any, **kwargs: Any) -> None:
        made.append(kwargs["address"])
        make(connection, *args, **kwargs)

    monkeypatch.setattr(GuardedConnection, "__init__", counted)
    with running(tmp_path) as service, contextlib.ExitStack() as stack:
        for number in range(100):
            stranger = stack.enter_context(service.connect(f"127.0.0.{2 + number % 50}"))
            if number % 2:
                stranger.sendall(HEAD)
        with service.connect() as known:
            assert service.answers(known)
        with service.connect() as confused:
            confused.sendall(b"\x16\x03\x01\x02\x00")  # TLS
            assert b" 400 " in everything(confused)
        with service.connect() as gone:
            gone.shutdown(socket.SHUT_WR)
            assert everything(gone) == b""
    assert made == ["127.0.0.1"] * 2


def test_headers_in_two_parts_are_answered_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An honest caller on a bad line waits, and is not refused."""
    monkeypatch.setattr(doors, "SWEEP_S", 0.05)
    with running(tmp_path) as service, service.connect() as caller:
        caller.sendall(HEAD)
        assert not select.select([caller], [], [], 0.02)[0]
        assert service.answers(caller, head=b"")


def greeting() -> bytes:
    """The first message of a TLS client."""
    sent = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), sent, server_hostname="x")
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return sent.read()


def test_silent_tls_handshakes_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that never begins TLS is cut off, and so is one that begins and says no more."""
    for name, value in (("HANDSHAKE_S", 0.5), ("HEAD_S", 0.5), ("SWEEP_S", 0.05)):
        monkeypatch.setattr(doors, name, value)
    authority = Authority.create(tmp_path / "tls")
    service = Service(tmp_path)
    with serving(service.app, tls=authority.issue("server", ["localhost"], days=1)) as url:
        address = urlsplit(url)
        where = (str(address.hostname), address.port or 0)
        with socket.create_connection(where, PATIENCE_S) as silent:
            assert everything(silent) == b""
        with socket.create_connection(where, PATIENCE_S) as begun:
            begun.sendall(greeting())
            assert everything(begun)[:1] == b"\x16", "the service answers"
        context = ssl.create_default_context(cafile=str(authority.certificate))
        with (
            socket.create_connection(where, PATIENCE_S) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as caller,
        ):
            caller.sendall(HEAD + service.authorization + b"\r\n")
            assert caller.recv(4096).startswith(b"HTTP/1.1 200")


class Look:
    """The first connection of a running service, as its door sees it with a clock of its own."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.connections: Queue[GuardedConnection] = Queue()
        self.connection: GuardedConnection | None = None
        made = GuardedConnection.connection_made

        def noted(connection: GuardedConnection, transport: Any) -> None:
            made(connection, transport)
            self.connections.put(connection)

        patch.setattr(GuardedConnection, "connection_made", noted)
        patch.setattr(doors, "SWEEP_S", 3600.0)

    def ask(self, what: str, *arguments: Any) -> Any:
        """In the thread of the service."""
        self.connection = connection = self.connection or self.connections.get(timeout=PATIENCE_S)
        answer: Future[Any] = Future()
        connection.loop.call_soon_threadsafe(
            lambda: answer.set_result(getattr(connection, what)(*arguments))
        )
        return answer.result(PATIENCE_S)

    def is_overdue(self, now: float) -> bool:
        return self.ask("is_overdue", now)

    def wait_for_bytes(self, old: int) -> int:
        """Until another number of bytes waits, twice the same: all is settled."""
        deadline = time.monotonic() + PATIENCE_S
        found = old
        while found == old or found != self.ask("_num_waiting_bytes"):
            assert time.monotonic() < deadline
            found = self.ask("_num_waiting_bytes")
            time.sleep(0.02)
        return found


@pytest.mark.parametrize("has_tls", [False, True])
def test_answers_that_nobody_reads_are_not_kept_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_tls: bool
) -> None:
    """A caller with a credential asks for much and reads nothing: it is cut off. One that reads a
    part now and then stays, and so does one that has read all of it."""
    look, service = Look(monkeypatch), Service(tmp_path)
    authority = Authority.create(tmp_path / "tls")
    tls = authority.issue("server", ["localhost"], days=1)
    with serving(service.app, tls=tls if has_tls else None) as url:
        address = urlsplit(url)
        where = (str(address.hostname), address.port or 0)
        with contextlib.ExitStack() as stack:
            caller = stack.enter_context(socket.create_connection(where, PATIENCE_S))
            if has_tls:
                context = ssl.create_default_context(cafile=str(authority.certificate))
                secure = context.wrap_socket(caller, server_hostname="localhost")
                caller = stack.enter_context(secure)
            caller.sendall(HEAD.replace(b"secret", b"large") + service.authorization + b"\r\n")
            waiting, now, left = look.wait_for_bytes(0), 1e6, LARGE_BYTES
            for _ in range(2):
                assert not look.is_overdue(now)
                assert not look.is_overdue(now + doors.UNREAD_S)
                left -= read(caller, PART_BYTES)
                waiting = look.wait_for_bytes(waiting)
                now += doors.UNREAD_S + 1
            assert not look.is_overdue(now)
            assert look.is_overdue(now + doors.UNREAD_S + 1)
            read(caller, left)
            assert look.wait_for_bytes(waiting) == 0
            assert not look.is_overdue(now + 86_400)


def test_a_long_poll_is_not_an_answer_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service takes the time that it needs, and a known caller may be idle."""
    look = Look(monkeypatch)
    with running(tmp_path) as service, service.connect() as caller:
        assert service.answers(caller)
        assert not look.is_overdue(1e9)
        caller.sendall(HEAD.replace(b"secret", b"poll") + service.authorization + b"\r\n")
        assert service.is_polled.wait(PATIENCE_S)
        assert not look.is_overdue(1e9) and not look.is_overdue(2e9)


def read(caller: socket.socket, num_bytes: int) -> int:
    found = 0
    while found < num_bytes:
        found += len(caller.recv(1 << 16))
    return found


class Knock:
    """A connection as the door sees it."""

    def __init__(self, address: str) -> None:
        self.address, self.subject, self.is_closed = address, "", False

    def abort(self) -> None:
        self.is_closed = True

    def is_overdue(self, now: float) -> bool:
        return False


def knock(address: str) -> GuardedConnection:
    return cast(GuardedConnection, Knock(address))


def test_one_credential_cannot_take_every_place() -> None:
    """Beyond half of all connections, those of one subject stay strangers and make room."""
    door = Door(max_connections=10, max_strangers=10, max_per_address=100)
    greedy = [knock("a") for _ in range(10)]
    for connection in greedy:
        assert door.enter(connection)
        if door.admit(connection, "greedy"):
            connection.subject = "greedy"
    others = [knock("b") for _ in range(5)]
    for number, connection in enumerate(others):
        assert door.enter(connection)
        assert door.admit(connection, f"other-{number}")
    assert sum(cast(Any, c).is_closed for c in greedy) == 5
    assert not any(cast(Any, c).is_closed for c in others)
    assert not door.enter(knock("c"))


def test_the_door_forgets_who_left() -> None:
    """A million connections one after the other leave nothing behind."""
    door = Door(max_connections=10, max_strangers=5, max_per_address=3)
    for number in range(10_000):
        connection = knock(f"address-{number}")
        assert door.enter(connection)
        if number % 2 and door.admit(connection, f"subject-{number}"):
            connection.subject = f"subject-{number}"
        door.leave(connection)
        door.leave(connection)
    assert len(door) == door.num_strangers == 0
    assert not any(getattr(door, name) for name in ("_by_address", "_by_subject", "_all"))
