# SPDX-License-Identifier: Apache-2.0
"""`penstock tools serve`: an outside MCP client and a workflow call the same tools over standard
streams and HTTP, and get equal answers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.unit.rollout.fake_dataflow import facts

from penstock.cli.tools import serve as serve_tools
from penstock.dataflow.service.nodes.messages import ToolServerInfo
from penstock.errors import ConfigError
from penstock.rollout.isolation import Isolation, IsolationSettings, Use, UseSettings
from penstock.rollout.sandbox.types import Grants
from penstock.rollout.tools.servers import open_tools

CLIENT = str(Path(__file__).with_name("outside_client.py"))
PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("python", {"code": "x = 6 * 7\nx"}),
    ("python", {"code": "print(x); 1 / 0"}),
    ("search", {"query": "penstock dam", "k": 1}),
    ("search", {"query": "zzz"}),
    ("write_file", {"path": "a/b.txt", "text": "hello"}),
    ("read_file", {"path": "a/b.txt"}),
    ("list_files", {}),
    ("read_file", {"path": "../b.txt"}),
    ("read_file", {"path": 3}),
]
READING: list[tuple[str, dict[str, Any]]] = [call for call in CALLS if call[0] != "write_file"]


class NoTurns:
    def turns(self) -> tuple[object, ...]:
        return ()


@pytest.fixture
def project() -> Iterator[Path]:
    """Not in tmp_path, which only its owner can read."""
    with tempfile.TemporaryDirectory(prefix="penstock-tools-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        for inner in ("docs", "files"):
            (folder / inner).mkdir()
        (folder / "docs" / "dam.md").write_text("A penstock carries water from a dam.\n\nMore.")
        (folder / "docs" / "sea.txt").write_text("The sea is salty.")
        yield folder


def serve(project: Path, *options: str) -> list[str]:
    folders = ["--search", str(project / "docs"), "--files", str(project / "files")]
    return [*PENSTOCK, "tools", "serve", "--python", *folders, *options]


async def outside(*target: str, calls: Sequence[tuple[str, dict[str, Any]]] = CALLS) -> Any:
    command = [sys.executable, CLIENT, json.dumps(calls), *target]
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await client.communicate()
    assert client.returncode == 0
    return json.loads(printed)


@asynccontextmanager
async def http_server(project: Path) -> AsyncGenerator[str]:
    command = serve(project, "--port", "0", "--json")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield json.loads(await process.stdout.readline())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()


async def inside(
    server: ToolServerInfo,
    isolation: Isolation,
    calls: Sequence[tuple[str, dict[str, Any]]] = CALLS,
) -> Any:
    """What a workflow gets from `ctx.tools`."""
    servers = await open_tools(facts(tools=(server,)), isolation)
    tools = servers.lease("source", "row", NoTurns())
    try:
        answers = list[object]()
        for name, arguments in calls:
            result = await tools.call({"function": {"name": name, "arguments": arguments}})
            answers.append([result.is_error, result.text])
        assert len(tools.uses) == len(calls)
        names = [spec["function"]["name"] for spec in tools.specs]
        return {"names": names, "answers": answers}
    finally:
        await tools.close()
        await servers.close()


async def test_outside_clients_and_workflows_get_equal_answers(project: Path) -> None:
    expected = [
        [False, "42\n"],
        [True, "42\nTraceback (most recent call last):"],
        [False, "[1] dam.md:1\nA penstock carries water from a dam."],
        [False, "nothing was found"],
        [False, "wrote 5 bytes to a/b.txt"],
        [False, "hello"],
        [False, "a/"],
        [True, "'../b.txt' is not a path below"],
        [True, "wrong arguments: path: 3 is not of type 'string'"],
    ]
    by_stdio = await outside(*serve(project, "--stdio"))
    assert by_stdio["names"] == ["python", "search", "list_files", "read_file", "write_file"]
    for (is_error, text), (fails, begins) in zip(by_stdio["answers"], expected, strict=True):
        assert is_error == fails and text.startswith(begins), text
    assert (project / "files" / "a" / "b.txt").read_text() == "hello"
    async with http_server(project) as url:
        assert await outside(url) == by_stdio
        host = url.split("/")[2]
        granted = UseSettings(grants=Grants(hosts=(host,)))
        isolation = Isolation(IsolationSettings(uses={Use.SERVERS: granted}))
        server = ToolServerInfo(name="served", url=url)
        assert await inside(server, isolation) == by_stdio
        with pytest.raises(ConfigError, match=r"tools\.served\.url .*not granted"):
            await inside(server, Isolation())


async def test_a_workflow_starts_the_same_server_in_its_sandbox(project: Path) -> None:
    """There python needs no second sandbox, and files cannot be written: the folder is granted
    for reading."""
    command = tuple(serve(project, "--stdio", "--backend", "none"))
    granted = UseSettings(grants=Grants(folders=(project,)))
    isolation = Isolation(IsolationSettings(uses={Use.SERVERS: granted}))
    found = await inside(ToolServerInfo(name="served", command=command, is_shared=True), isolation)
    assert found["answers"][0] == [False, "42\n"]
    assert found["answers"][2][1].startswith("[1] dam.md:1\nA penstock carries water")
    is_error, text = found["answers"][4]
    assert is_error and "Read-only file system" in text


@pytest.mark.timeout(400)
async def test_a_command_answers_a_workflow_as_it_answers_an_outside_client(project: Path) -> None:
    """Word by word, over standard streams; the workflow's is in a sandbox that can only read."""
    (project / "files" / "a").mkdir()
    (project / "files" / "a" / "b.txt").write_text("hello")
    command = serve(project, "--stdio", "--backend", "none")
    by_client = await outside(*command, calls=READING)
    granted = UseSettings(grants=Grants(folders=(project,)))
    isolation = Isolation(IsolationSettings(uses={Use.SERVERS: granted}))
    server = ToolServerInfo(name="served", command=tuple(command), is_shared=True)
    assert await inside(server, isolation, READING) == by_client
    assert [False, "hello"] in by_client["answers"] and [False, "42\n"] in by_client["answers"]


@pytest.mark.timeout(400)
async def test_a_killed_node_leaves_no_tool_process() -> None:
    """SIGKILL, with a server of an attempt, a shared one, and a program that Python of a model
    started."""
    command = [sys.executable, "-m", "tests.unit.rollout.tools.node_with_tools"]
    root = Path(__file__).parents[4]
    node = await asyncio.create_subprocess_exec(*command, cwd=root, stdout=asyncio.subprocess.PIPE)
    try:
        assert node.stdout is not None
        assert (await node.stdout.readline()).strip() == b"ready"
        started = psutil.Process(node.pid).children(recursive=True)
        commands = [" ".join(one.cmdline()) for one in started]
        assert sum("hostile_server.py" in command for command in commands) >= 2, commands
        assert any(command == "sleep 10000" for command in commands), commands
    finally:
        node.send_signal(signal.SIGKILL)
        await node.communicate()
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, timeout=200)
    assert alive == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "nothing to serve"),
        ({"python": True, "host": "0.0.0.0"}, "reachable from other machines"),
        ({"search": Path("/nowhere")}, "is not a folder"),
        ({"search": Path(".")}, "has no .txt, .md, .jsonl file"),
    ],
)
def test_a_wrong_option_is_refused(
    options: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=says):
        serve_tools(**options)
