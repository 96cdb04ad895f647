# SPDX-License-Identifier: Apache-2.0
"""Engines are out of reach of agents: no port, a private folder, and only the keeper's calls."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import socket
import stat
import sys
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.contract.fake_vllm_server import write_environment
from tests.contract.test_engines_vllm import ask, version, write_folder

from penstock.errors import ConfigError, EngineError
from penstock.gateway.generation import GenerationRequest
from penstock.rollout.engines.vllm import ChildServer, VllmEngine
from penstock.rollout.engines.vllm.generate_api import CompletionParser
from penstock.rollout.http_client import KEY_FILE_VARIABLE, HttpClient, read_server_key
from penstock.types import PolicyName, SamplingSpec, Version

SCANNER = """
import http.client, json, sys
ports = set()
for table in ("/proc/net/tcp", "/proc/net/tcp6"):
    for line in open(table).read().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A":
            ports.add(int(words[1].rpartition(":")[2], 16))
found = []
for port in sorted(ports):
    try:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=0.5)
        connection.request("GET", "/canary")
        if connection.getresponse().read(4096).decode(errors="replace") == sys.argv[1]:
            found.append(port)
    except Exception:
        pass
print(json.dumps({"num_ports": len(ports), "found": found}))
"""
NOBODY = 65534


@pytest.fixture
async def child(tmp_path: Path) -> AsyncIterator[tuple[ChildServer, VllmEngine]]:
    """The engine of a node: its server is a child process."""
    environment = write_environment(tmp_path / "environment", tmp_path / "pids")
    server = ChildServer(environment, ["--dtype", "float32"], state_dir=tmp_path / "state")
    engine = VllmEngine(server)
    try:
        await engine.load(write_folder(tmp_path / "versions" / "0", 0), version(0))
        yield server, engine
    finally:
        await engine.close()


def processes(server: ChildServer) -> list[psutil.Process]:
    assert server.group is not None
    leader = psutil.Process(server.group)
    return [leader, *leader.children(recursive=True)]


def socket_of(engine: VllmEngine) -> Path:
    assert engine.url is not None
    return Path(engine.url.removeprefix("unix:"))


@pytest.mark.finding(4)
async def test_an_agent_that_scans_loopback_finds_no_engine(
    child: tuple[ChildServer, VllmEngine], tmp_path: Path
) -> None:
    """A program beside the engine asks every listening port of the machine for the engine."""
    server, engine = child
    with socket.create_server(("127.0.0.1", 0)):  # the scanner does see ports
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SCANNER, str(tmp_path / "pids")),
            stdout=asyncio.subprocess.PIPE,
        )
        printed, _ = await agent.communicate()
    scanned = json.loads(printed)
    assert scanned["num_ports"] >= 1
    assert scanned["found"] == [], "the engine answers an agent"
    listening = [
        found.laddr
        for process in processes(server)
        for found in process.net_connections("inet")
        if found.status == psutil.CONN_LISTEN
    ]
    assert listening == []
    assert len((await ask(engine)).sampled_ids) > 0, "the keeper still reaches it"


@pytest.mark.finding(4)
async def test_the_engines_socket_is_in_a_folder_of_its_owner_only(
    child: tuple[ChildServer, VllmEngine],
) -> None:
    """Another user of the machine cannot reach the engine through its socket."""
    _, engine = child
    path = socket_of(engine)
    assert stat.S_ISSOCK(path.stat().st_mode)
    folder = path.parent.stat()
    assert stat.S_IMODE(folder.st_mode) == 0o700 and folder.st_uid == os.getuid()
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    attack = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"
    agent = await asyncio.create_subprocess_exec(
        *("/usr/bin/env", "python3", "-I", "-c", attack, str(path)),
        stderr=asyncio.subprocess.PIPE,
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
    )
    _, printed = await agent.communicate()
    assert agent.returncode != 0 and b"PermissionError" in printed


async def test_options_of_the_run_file_cannot_open_a_port(tmp_path: Path) -> None:
    """A run file that asks vLLM for a port and another socket still gets the private socket."""
    environment = write_environment(tmp_path / "environment", tmp_path / "pids")
    options = ["--host", "0.0.0.0", "--port", "8000", "--uds=/tmp/open", "--dtype", "float32"]
    server = ChildServer(environment, options, state_dir=tmp_path / "state")
    try:
        url, _ = await server.start(write_folder(tmp_path / "versions" / "0", 0))
        path = url.removeprefix("unix:")
        assert stat.S_ISSOCK(os.stat(path).st_mode)
        commands = [" ".join(process.cmdline()) for process in processes(server)]
        assert any(command.endswith(f"--uds {path}") for command in commands)
    finally:
        await server.stop()
    with pytest.raises(FileNotFoundError):
        os.stat(path)


@pytest.mark.parametrize(
    "url", ["unix:relative.sock", "unix:", "unix:/" + "x" * 200, "file:///etc/passwd", "https://h"]
)
def test_an_engine_address_that_is_no_address_is_refused(url: str) -> None:
    """Only http://HOST:PORT and unix:/PATH name an engine; no other scheme is opened."""
    with pytest.raises(ConfigError, match="engine URL"):
        HttpClient(url)


async def heard_by_a_server(client_key: str) -> bytes:
    """The head that a server gets from the client."""
    heads: asyncio.Queue[bytes] = asyncio.Queue()
    ended = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.put_nowait(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}", key=client_key)
    await client.request("GET", "/health")
    client.abort("done")
    await ended.wait()
    server.close()
    return heads.get_nowait()


async def test_an_engine_behind_a_port_gets_a_key_from_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang has no unix socket: its key comes from a file, and never from argv."""
    (tmp_path / "key").write_text("abc-123\n")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
    assert b"authorization: Bearer abc-123\r\n" in await heard_by_a_server(read_server_key())
    monkeypatch.delenv(KEY_FILE_VARIABLE)
    assert b"authorization" not in await heard_by_a_server(read_server_key())


@pytest.mark.parametrize("content", ["", " \n", "a\r\nx-admin: 1", "a b", "ключ"])
def test_a_key_file_cannot_add_headers(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not one printable word is no key; nothing else reaches the engine's head."""
    (tmp_path / "key").write_text(content, encoding="utf-8")
    monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
    with pytest.raises(ConfigError, match="key"):
        read_server_key()


async def test_the_engine_has_no_network_but_its_own(
    child: tuple[ChildServer, VllmEngine],
) -> None:
    """Ports that vLLM's workers open among themselves are not on the agents' loopback."""
    if shutil.which("bwrap") is None:
        pytest.skip("no bubblewrap on this machine")
    server, _ = child
    _, *inside = [process for process in processes(server) if process.name() != "bwrap"]
    assert inside
    ours = os.readlink("/proc/self/ns/net")
    assert ours not in {os.readlink(f"/proc/{process.pid}/ns/net") for process in inside}


def answers(ids: list[int], *, is_packed: bool) -> bytes:
    """Of a server, with these token ids."""
    choice: dict[str, Any] = {"finish_reason": "stop"}
    if is_packed:
        data = array("i", ids).tobytes() + array("f", [-1.0] * len(ids)).tobytes()
        choice["packed"] = base64.b64encode(data).decode()
    else:
        choice["token_ids"] = ids
        content = [{"token_id": token, "logprob": -1.0} for token in ids]
        choice["logprobs"] = {"content": content}
    return json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize(
    ("ids", "is_packed"), [([3, -5], True), ([3, -5], False), ([1 << 31], False)]
)
def test_ids_of_an_engine_that_no_token_has_are_refused(ids: list[int], is_packed: bool) -> None:
    """They had no text, and ended the node where slots of a group are attempted together."""
    served = Version(policy=PolicyName("p"), incarnation=1, number=0)
    request = GenerationRequest((1,), SamplingSpec(), policy=served.policy, session="s")
    parser = CompletionParser(lambda: served, request)
    with pytest.raises(EngineError, match="do not match its tokens"):
        parser.feed_event(answers(ids, is_packed=is_packed))
