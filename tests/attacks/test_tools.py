# SPDX-License-Identifier: Apache-2.0
"""Tools lead nowhere: not out of their folder, not to secrets, not into the node's network."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
import signal
import sys
import threading
from collections.abc import AsyncGenerator, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, cast

import anyio
import bm25s  # pyright: ignore[reportMissingTypeStubs] - it has none
import httpx2
import pytest
from mcp.shared.message import SessionMessage
from tests.attacks.test_secrets import needs_root, project, rob
from tests.unit.rollout.fake_dataflow import facts

from penstock.dataflow.service.nodes.messages import ToolServerInfo
from penstock.errors import ConfigError, SandboxError
from penstock.rollout.isolation import Isolation, IsolationSettings, Use, UseSettings
from penstock.rollout.sandbox.types import Grants
from penstock.rollout.tool_sandbox import ToolSandbox
from penstock.rollout.tools.arguments import ArgumentCheck
from penstock.rollout.tools.catalog import make_catalog
from penstock.rollout.tools.file_tools import FileSession, HostFolder
from penstock.rollout.tools.http import MAX_RESPONSE_BYTES, GuardedTransport, HttpServer
from penstock.rollout.tools.mcp_session import Ending, McpSession
from penstock.rollout.tools.python_tool import PythonSession
from penstock.rollout.tools.search_tool import MAX_QUERY_WORDS, MAX_SEARCHES, Index, SearchSession
from penstock.rollout.tools.servers import open_tools
from penstock.rollout.tools.stdio import (
    _read_lines as read_messages,  # pyright: ignore[reportPrivateUsage]
)
from penstock.rollout.tools.types import ToolFailed, ToolResult, ToolSpec
from penstock.rollout.user_errors import MAX_LAST_WORDS_CHARS

__all__ = ["project"]
ESCAPES = (
    "../secret",
    "a/../../secret",
    "./../secret",
    "/etc/passwd",
    "//etc/passwd",
    "/work/../etc/passwd",
    "link",
    "folder_link/secret",
    "a\0b",
    "..",
    "",
    ".",
    "~/secret",
    "x/" * 100 + "y",
    "fifo",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of tools, with a secret beside it and every way there that a link offers."""
    inner = tmp_path / "tools"
    inner.mkdir()
    (tmp_path / "secret").write_text("SECRET")
    (inner / "link").symlink_to(tmp_path / "secret")
    (inner / "folder_link").symlink_to(tmp_path)
    os.mkfifo(inner / "fifo")
    return inner


@pytest.mark.parametrize("path", ESCAPES)
async def test_no_path_leads_out_of_the_folder(path: str, folder: Path) -> None:
    """Reading, listing and writing stay in the folder, whatever the path and the links in it."""
    session = FileSession(HostFolder(folder).opened)
    read = await session.call("read_file", {"path": path})
    assert read.is_error and "SECRET" not in read.text and "root:" not in read.text
    listed = await session.call("list_files", {"path": path})
    assert path == "." or (listed.is_error and "secret" not in listed.text.replace(path, ""))
    await session.call("write_file", {"path": path, "text": "OVERWRITTEN"})
    assert (folder.parent / "secret").read_text() == "SECRET"
    assert sorted(os.listdir(folder.parent)) == ["secret", "tools"]


async def test_code_of_a_model_cannot_plant_a_link_for_the_file_tools() -> None:
    """The folder of an attempt belongs to hostile programs; the file tools read it from outside."""
    sandbox = ToolSandbox(Isolation())
    session = FileSession(sandbox.started)
    try:
        await sandbox.exec(["sh", "-c", "ln -s /etc/passwd p; ln -s /etc d; ln -s / root"])
        for path in ("p", "d/passwd", "root/etc/passwd"):
            result = await session.call("read_file", {"path": path})
            assert result.is_error and "root:" not in result.text
        assert (await session.call("list_files", {"path": "d"})).is_error
        await session.call("write_file", {"path": "p", "text": "x"})
        written = await session.call("read_file", {"path": "p"})
        assert written.text == "x", "a file of its own took the place of the link"
    finally:
        await sandbox.close()


async def test_search_does_not_follow_a_link_out_of_its_folder(tmp_path: Path) -> None:
    """An index of a folder has nothing of the files that links in it name."""
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "secret.txt").write_text("the password is swordfish")
    (docs / "plain.txt").write_text("nothing of interest")
    (docs / "link.txt").symlink_to(tmp_path / "secret.txt")
    found = await SearchSession(docs).call("search", {"query": "password swordfish"})
    assert found.text == "nothing was found"


def passages(folder: Path) -> SearchSession:
    """A session over ten passages."""
    names = " ".join(f"name{number}" for number in range(100))
    for number in range(10):
        (folder / f"{number}.txt").write_text(f"common {names} number{number}")
    return SearchSession(folder)


async def test_a_query_looks_at_each_word_once_and_at_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """52,000 characters of one word took four seconds of a thread: each time, every passage that
    has it was looked at again."""
    looked_at: list[int] = []
    real = cast(Any, bm25s.BM25).get_scores_from_ids

    def scores(index: Any, words: list[int], *args: Any, **named: Any) -> Any:
        looked_at.append(len(words))
        return real(index, words, *args, **named)

    monkeypatch.setattr(bm25s.BM25, "get_scores_from_ids", scores)
    session = passages(tmp_path)

    async def search(query: str) -> ToolResult:
        return await session.call("search", {"query": query, "k": 1})

    try:
        once, again = await search("common number7"), await search("common number7 " * 100)
        assert "number7" in once.text and again == once
        many = await search(" ".join(f"name{number}" for number in range(100)))
        assert "name5" in many.text and not many.is_error
        assert looked_at == [2, 2, MAX_QUERY_WORDS]
        refused = await search("common " * 10_000)
        assert refused.is_error and "at most 2,000" in refused.text and len(refused.text) < 200
        assert len(looked_at) == 3
    finally:
        await session.close()


async def test_searches_that_were_given_up_hold_up_no_other_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They filled the threads that the node has for everything, such as the files of sandboxes."""
    go_on, started, has_started = threading.Event(), list[str](), threading.Semaphore(0)

    def search(index: Index, query: str, k: int) -> list[Any]:
        started.append(query)
        has_started.release()
        go_on.wait(60)
        return []

    monkeypatch.setattr(Index, "search", search)
    session = passages(tmp_path)
    await session.list()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    searches = [
        asyncio.create_task(session.call("search", {"query": str(number)})) for number in range(12)
    ]
    try:
        async with asyncio.timeout(60):
            for _ in range(MAX_SEARCHES):
                assert await asyncio.to_thread(has_started.acquire, timeout=60)
        for one in searches:
            one.cancel()
        await asyncio.gather(*searches, return_exceptions=True)
        go_on.set()
        assert (await session.call("search", {"query": "next"})).text == "nothing was found"
        assert [*sorted(started[:-1]), started[-1]] == ["0", "1", "2", "3", "next"]
    finally:
        go_on.set()
        await session.close()


@needs_root
@pytest.mark.parametrize("use", ["python", "servers"])
def test_tools_find_none_of_seven_secrets(use: str, project: Path) -> None:
    """Python of a model and a tool server of strangers find 0 of 7 secrets of the node."""
    assert rob(use, "auto", project) == []


async def test_without_isolation_no_tool_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs of strangers and code of models have no fallback; the message names the fix."""
    command = (sys.executable, "-c", "open('/tmp/penstock-was-here', 'w')")
    servers = [
        ToolServerInfo(name="x", command=command),
        ToolServerInfo(name="x", builtin="python"),
        ToolServerInfo(name="x", builtin="files"),
    ]
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("penstock.rollout.isolation._tested", {})
    for server in servers:
        with pytest.raises(SandboxError, match="apt install bubblewrap"):
            await open_tools(facts(tools=(server,)), Isolation())


@pytest.mark.parametrize(
    "server",
    [
        ToolServerInfo(name="x", builtin="search", folder="/etc"),
        ToolServerInfo(name="x", builtin="search", folder="~/.ssh"),
        ToolServerInfo(name="x", url="http://127.0.0.1:8000/mcp"),
        ToolServerInfo(name="x", url="http://tools.example.com/mcp"),
        ToolServerInfo(name="x", builtin="shell"),
    ],
)
async def test_a_node_grants_nothing_because_a_run_asks_for_it(server: ToolServerInfo) -> None:
    """A node that joined the run of a stranger reads no folder and calls no host for it."""
    with pytest.raises(ConfigError, match=r"tools\.x\."):
        await open_tools(facts(tools=(server,)), Isolation())


async def test_a_token_is_a_secret_of_the_node_s_own_machine() -> None:
    """A run names a secret; the file behind it is what the node's machine grants."""
    server = ToolServerInfo(name="x", url="http://127.0.0.1:1/mcp", token="cloud")
    granted = UseSettings(grants=Grants(hosts=("127.0.0.1:1",)))
    isolation = Isolation(IsolationSettings(uses={Use.SERVERS: granted}))
    with pytest.raises(ConfigError, match="does not grant"):
        await open_tools(facts(tools=(server,)), isolation)


# --- requests into the node's network -------------------------------------------------------------


@asynccontextmanager
async def internal_service(answer: bytes) -> AsyncGenerator[tuple[int, list[bytes]]]:
    """Something that listens inside the network; says what it heard."""
    heard = list[bytes]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1], heard


async def call(url: str, hosts: tuple[str, ...], resolved: Sequence[str] = ()) -> str:
    """What a workflow reads of a call to this URL."""

    async def resolve(host: str, port: int) -> Sequence[str]:
        return resolved or [host]

    server = HttpServer(url=url, hosts=hosts, timeout_s=30.0, resolve=resolve)
    session = McpSession("x", server.connect, 30.0)
    try:
        with pytest.raises(ToolFailed) as caught:
            await session.call("t", {})
        return str(caught.value)
    finally:
        await session.close()


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "2130706433", "0x7f.1", "0177.0.0.1", "[::1]", "a@127.0.0.1"],
)
async def test_an_address_of_this_machine_is_not_reached(host: str) -> None:
    """However it is written, an address that was not granted gets no request."""
    async with internal_service(b"") as (port, heard):
        said = await call(f"http://{host}:{port}/mcp", ("tools.example.com",))
    assert not heard and "is not available" in said


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "fd00::1"])
async def test_a_granted_name_that_resolves_inside_is_refused(address: str) -> None:
    """The name server of a stranger cannot lead a node to its metadata service."""
    async with internal_service(b"") as (port, heard):
        name = f"tools.example.com:{port}"
        said = await call(f"http://{name}/mcp", (name,), [address])
    assert not heard and "not a public address" in said


async def test_a_server_chooses_no_codec() -> None:
    """With `hex` the reader of events fails; with `punycode` it takes the square of the text."""
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=hex\r\ncontent-length: 2"
    async with internal_service(f"{head}\r\n\r\nhi".encode()) as (port, _):
        url, host = f"http://127.0.0.1:{port}/", f"127.0.0.1:{port}"

        async def resolve(name: str, port: int) -> Sequence[str]:
            return [name]

        transport = GuardedTransport(url, (host,), resolve, Ending())
        async with httpx2.AsyncClient(transport=transport) as client:
            answer = await client.get(url)
    assert (answer.headers["content-type"], answer.text) == ("text/event-stream", "hi")


async def test_a_redirect_is_not_followed_inside() -> None:
    """A granted server that redirects to an internal one is an error, not a request."""
    async with internal_service(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n") as (port, heard):
        away = f"HTTP/1.1 307 Go\r\nlocation: http://127.0.0.1:{port}/\r\ncontent-length: 0\r\n\r\n"
        async with internal_service(away.encode()) as (granted, asked):
            host = f"127.0.0.1:{granted}"
            await call(f"http://{host}/mcp", (host,))
    assert asked and not heard


@pytest.mark.parametrize("is_compressed", [False, True])
async def test_a_response_without_end_does_not_fill_the_node(is_compressed: bool) -> None:
    """A server that floods is an error; a compressed answer is refused unread."""
    body = b"x" * (MAX_RESPONSE_BYTES + (1 << 20))
    extra = b"content-encoding: gzip\r\n" if is_compressed else b""
    body = gzip.compress(body, 1) if is_compressed else body
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + extra
    async with internal_service(head + b"\r\n" + body) as (port, _):
        host = f"127.0.0.1:{port}"
        said = await call(f"http://{host}/mcp", (host,))
    assert ("compressed" if is_compressed else "it sent more than") in said


@asynccontextmanager
async def restless_server() -> AsyncGenerator[tuple[str, list[bytes]]]:
    """An MCP server whose streams of events end at once and ask to be opened again; what it got."""
    heard = list[bytes]()
    none: dict[str, Any] = {}
    info = {"name": "x", "version": "1"}
    started = {"protocolVersion": "2025-06-18", "capabilities": none, "serverInfo": info}
    results: dict[str, Any] = {"initialize": started, "tools/list": {"tools": []}}

    def answer(method: bytes, body: bytes) -> tuple[str, str]:
        if method == b"GET":
            note = '{"jsonrpc": "2.0", "method": "notifications/message", "params": {}}'
            return "200 OK\r\ncontent-type: text/event-stream", f"id: 1\nretry: 0\ndata: {note}\n\n"
        asked = json.loads(body or b"{}")
        if "id" not in asked:
            return "202 Accepted", ""
        said = {"jsonrpc": "2.0", "id": asked["id"], "result": results[asked["method"]]}
        return "200 OK\r\ncontent-type: application/json\r\nmcp-session-id: s", json.dumps(said)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(size[1])) if size else b""
                heard.append(head.split()[0])
                start, text = answer(heard[-1], body)
                writer.write(
                    f"HTTP/1.1 {start}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode()
                )
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", heard


async def test_a_server_cannot_make_a_session_reconnect_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `retry: 0` a session that nobody used opened hundreds of streams in a second."""
    monkeypatch.setattr("penstock.rollout.tools.http.MIN_STREAM_S", 0.4)
    async with restless_server() as (host, heard):
        server = HttpServer(url=f"http://{host}/mcp", hosts=(host,), timeout_s=30.0)
        session = McpSession("x", server.connect, 30.0)
        assert not await session.list()
        await asyncio.sleep(1.5)
        await session.close()
    assert 2 <= heard.count(b"GET") <= 5


# --- what a server lists and answers, and what a model calls it with ------------------------------


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


_SLOW = "(a+)+$"
_SLOW_NAME = "a" * 40 + "!"
_STOCK = {"$schema": "https://json-schema.org/draft/2020-12/schema", "pattern": _SLOW}
COSTLY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a pattern beside additionalProperties": (
        {"type": "object", "patternProperties": {_SLOW: {}}, "additionalProperties": False},
        {_SLOW_NAME: 1},
    ),
    "a pattern beside unevaluatedProperties": (
        {"type": "object", "patternProperties": {_SLOW: {}}, "unevaluatedProperties": False},
        {_SLOW_NAME: 1},
    ),
    "a part with a dialect of its own": (_object(x=_STOCK), {"x": _SLOW_NAME}),
    "a reference into a constant": (
        _object(x={"$ref": "#/const"}) | {"const": _STOCK},
        {"x": _SLOW_NAME},
    ),
    "an encoded reference into a constant": (
        _object(x={"$ref": "#/properties/y%2Fconst"}, y={"const": _STOCK}),
        {"x": _SLOW_NAME},
    ),
    "a reference to the schema of schemas": (
        _object(x={"$ref": _STOCK["$schema"]}),
        {"x": {"properties": {str(n): {"items": {}} for n in range(20_000)}}},
    ),
    "many parts for each of many items": (
        _object(x={"items": {"allOf": [{}] * 7000}}),
        {"x": [0] * 10_000},
    ),
    "many parts behind few references": (
        _object(x={"items": {"$ref": "#/$defs/b"}}) | {"$defs": {"b": {"allOf": [{}] * 7000}}},
        {"x": [0] * 1900},
    ),
    "a long value in each of many problems": (
        _object(x={"anyOf": [{"type": "null"}] * 1500}),
        {"x": ["a" * 50] * 20_000},
    ),
    "a long value that many parts never allow": (
        _object(x={"anyOf": [False] * 4000}),
        {"x": ["a" * 50] * 20_000},
    ),
}


class _Pieces:
    """Output of a program, cut as it likes."""

    def __init__(self, *pieces: bytes) -> None:
        self._left = iter(pieces)

    async def read(self, n: int = -1) -> bytes:
        await asyncio.sleep(0)
        return next(self._left, b"")

    async def readexactly(self, n: int) -> bytes:
        raise AssertionError("lines have no length")


class _TooSlow(Exception):
    pass


@contextmanager
def cpu_limit(seconds: float) -> Generator[None]:
    """Raises after this much work of this process, also within a regular expression."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    except _TooSlow:
        raise AssertionError(f"more than {seconds} s of work") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


HALF_A_LINE = (b"x" * (1 << 16),) * 60
OUTPUTS = {
    "single bytes of a long line": ((*HALF_A_LINE, *(b"x",) * 1000), ""),
    "a line without end": (HALF_A_LINE * 2, "it sent a line of more than 4 MiB"),
    "empty lines": ((b"\n" * (1 << 16),) * 100, "more than 1,000 lines that are not MCP messages"),
}


@pytest.mark.parametrize("output", OUTPUTS)
async def test_a_tool_server_does_not_take_the_event_loop_of_its_node(output: str) -> None:
    """All that it had sent of a line was copied and searched again for each byte: 7 ms for one."""
    pieces, why = OUTPUTS[output]
    to_session, session = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    with to_session, session, cpu_limit(1):
        assert why in await read_messages(_Pieces(*pieces), to_session)


async def test_a_message_of_very_many_parts_is_not_built() -> None:
    """4 MB of empty lists took its node's event loop for most of a second, again and again."""
    parts = ",".join(["[]"] * (1 << 20))
    line = f'{{"jsonrpc": "2.0", "method": "x", "params": {{"y": [{parts}]}}}}\n'.encode()
    to_session, session = anyio.create_memory_object_stream[SessionMessage | Exception](1)
    with to_session, session:
        assert "lists and objects" in await read_messages(_Pieces(line), to_session)
        assert session.statistics().current_buffer_used == 0


LISTS = ",".join(["[]"] * 50_000)
MANY_PARTS = {
    "a message": ("application/json", f'{{"x": [{LISTS}]}}'),
    "an event": ("text/event-stream", f'data: {{"x": [{LISTS}]}}\n\n'),
    "an event without end": ("Text/Event-Stream", f'data: {{"x": [{LISTS}]}}'),
    "an event behind others": ("text/event-stream", f"data: {{}}\r\n\r\ndata: [{LISTS}]\r\r"),
    "behind a quote in a comment": ("text/event-stream", f': "\ndata: [{LISTS}]\n\n'),
    "behind a quote that is escaped": ("text/event-stream", f': "\\\ndata: [{LISTS}]\n\n'),
    "behind a quote in an event": ("text/event-stream", f'data: "\n\ndata: [{LISTS}]\n\n'),
    "in lines": ("text/event-stream", 'data: [""\n' * 20_000 + "\n"),
}


async def ask(kind: str, body: str) -> bytes:
    """What a client gets of this response."""
    head = (
        f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(body.encode())}\r\n\r\n"
    )
    async with internal_service((head + body).encode()) as (port, _):
        host = f"127.0.0.1:{port}"
        transport = GuardedTransport(f"http://{host}/mcp", (host,), resolve_ip, Ending())
        async with httpx2.AsyncClient(transport=transport) as client:
            return (await client.post(f"http://{host}/mcp")).content


async def resolve_ip(host: str, port: int) -> Sequence[str]:
    return [host]


@pytest.mark.parametrize("name", MANY_PARTS)
async def test_a_response_of_very_many_parts_is_not_passed_on(name: str) -> None:
    """8 MB of empty lists from a server over HTTP held its node's event loop for five seconds, and
    took 600 MB."""
    with pytest.raises(httpx2.TransportError, match=r"lists and objects|lines"):
        await ask(*MANY_PARTS[name])


async def test_events_are_passed_on_as_they_were_sent() -> None:
    """Text may have as many brackets as it likes."""
    text = json.dumps({"text": "[" * 50_000 + '\\"' * 300_000})
    for end in ("\n\n", "\r\n\r\n", "\r\r"):
        body = f": a note{end}id: 1{end}data: {text}{end}data: rest"
        assert (await ask("text/event-stream", body)).decode() == body
    assert (await ask("application/json", text)).decode() == text


async def test_an_answer_of_an_interpreter_is_not_built_from_very_many_parts() -> None:
    """The code that a model wrote may take over the driver and answer in its place."""
    body = f'{{"text": "x", "y": [{",".join(["[]"] * (1 << 20))}]}}'.encode()
    process = SimpleNamespace(stdin=_Sink(), stdout=asyncio.StreamReader(limit=1 << 23))
    process.stdout.feed_data(len(body).to_bytes(4, "little") + body)
    session = PythonSession(cast(Any, None), 1.0)
    with pytest.raises(ValueError, match="an answer that the driver does not give"):
        await session._ask(cast(Any, process), "x")  # pyright: ignore[reportPrivateUsage]


class _Sink:
    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass


async def test_a_tool_server_may_end_its_messages_with_an_empty_line() -> None:
    pong = b'{"jsonrpc": "2.0", "id": 1, "result": {}}\r\n\r\n'
    to_session, session = anyio.create_memory_object_stream[SessionMessage | Exception](1)
    with to_session, session:
        reading = asyncio.create_task(read_messages(_Pieces(*[pong] * 1500), to_session))
        for _ in range(1500):
            assert isinstance(await session.receive(), SessionMessage)
        assert await reading == ""


@pytest.mark.parametrize("how", COSTLY)
def test_the_schema_of_a_stranger_does_not_stop_the_node(how: str) -> None:
    """A node checks arguments on its event loop: what a tool server lists cannot hold it up, nor
    lead to a rejection of arguments that its own server would take."""
    schema, arguments = COSTLY[how]
    spec = ToolSpec(name="t", description="", parameters=schema)
    with cpu_limit(20):
        [tool] = make_catalog([ToolServerInfo(name="x")], {"x": [spec]}).tools
        problem = tool.check(arguments)
    assert not problem or how.startswith("a long value")


NUMBERS: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"multipleOf": 0.5}, False),
    ({"maximum": 3.5}, True),
    ({"not": {"pattern": "x"}}, False),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, False),
)


@pytest.mark.parametrize(("schema", "is_wrong"), NUMBERS)
def test_a_number_beyond_every_float_is_checked_or_left_to_the_server(
    schema: dict[str, Any], is_wrong: bool
) -> None:
    """No argument of a model raises, and a keyword that is not checked rejects nothing."""
    check = ArgumentCheck(_object(x=schema))
    assert bool(check({"x": 6 * 10**400})) == is_wrong


HOSTILE = str(Path(__file__).parents[1] / "unit" / "rollout" / "tools" / "hostile_server.py")


class _NoTurns:
    def turns(self) -> tuple[object, ...]:
        return ()


async def test_arguments_of_one_attempt_do_not_end_a_server_that_all_share() -> None:
    """A model that nests its arguments without end reads that it may not; the server of the other
    attempts keeps its state."""
    command = (sys.executable, "-S", HOSTILE, "good")
    info = ToolServerInfo(name="x", command=command, is_shared=True)
    servers = await open_tools(facts(tools=(info,)), Isolation())
    try:
        mine, other = (servers.lease("source", row, _NoTurns()) for row in ("a", "b"))
        assert (await other.call({"name": "echo", "arguments": {"text": "count"}})).text == "1"
        for depth in (70, 300, 900):
            nested = '{"text": "x", "more": ' + "[" * depth + "]" * depth + "}"
            said = await mine.call({"name": "echo", "arguments": nested})
            assert said.is_error and "levels deep" in said.text
        assert (await other.call({"name": "echo", "arguments": {"text": "count"}})).text == "2"
    finally:
        await servers.close()


async def test_the_bill_of_a_server_is_a_number_that_can_be_recorded() -> None:
    """A cost beyond every float neither ends an attempt nor makes its row unacceptable."""
    command = (sys.executable, "-S", HOSTILE, "good")
    servers = await open_tools(
        facts(tools=(ToolServerInfo(name="x", command=command),)), Isolation()
    )
    tools = servers.lease("source", "row", _NoTurns())
    try:
        said = await tools.call({"name": "echo", "arguments": {"text": "bill"}})
        assert (said.text, said.is_error, said.cost) == ("paid", False, 0.0)
    finally:
        await tools.close()
        await servers.close()


async def test_a_tool_server_that_ends_shows_no_granted_secret(tmp_path: Path) -> None:
    """What it printed last is read by the model and delivered: neither a secret of this machine nor
    a part of one is in it, wherever the text is cut."""
    secret = "swordfish-0123456789-abcdefghij"
    (tmp_path / "key").write_text(secret)
    code = (
        "import os, sys; s = open(os.environ['PENSTOCK_SECRETS'] + '/key').read(); "
        f"sys.exit(s + 'x' * {MAX_LAST_WORDS_CHARS - 12} + '\\n')"
    )
    granted = UseSettings(grants=Grants(secrets={"key": tmp_path / "key"}))
    isolation = Isolation(IsolationSettings(uses={Use.SERVERS: granted}))
    server = ToolServerInfo(name="x", command=(sys.executable, "-S", "-c", code))
    with pytest.raises(ConfigError) as caught:
        await open_tools(facts(tools=(server,)), isolation)
    assert "xxxx" in str(caught.value) and secret[-8:] not in str(caught.value)
