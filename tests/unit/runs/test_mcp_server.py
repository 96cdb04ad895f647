# SPDX-License-Identifier: Apache-2.0
"""`penstock mcp` over HTTP: who may call what, and what the log of actions says afterwards."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from mcp import MCPError
from tests.unit.runs.mcp_client import call, client

from penstock.config import demo_config
from penstock.fleet.run_folder import RunFolder
from penstock.runs.mcp_server import SKILL, OperatorServer
from penstock.runs.operator_tools import OPERATORS, TOOLS
from penstock.runs.tokens import issue, revoke
from penstock.wire.auth import Audience, Role, Signer, Verifier

READING = ["status", "report", "explain", "samples"]
ACTIONS: dict[str, dict[str, Any]] = {
    "scale": {"to": 2, "reason": "trainers wait for data"},
    "drain": {"node": "node-0", "reason": "its engine returns noise"},
    "tag": {"node": "node-0", "add": ["train"], "reason": "the trainer died"},
    "fork": {"step": 0, "reason": "the reward was wrong"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run whose launcher is this process, as far as anybody can tell."""
    found = RunFolder(tmp_path / "run")
    found.write_config(demo_config(0))
    found.allocate_endpoints(tmp_path, ())
    Signer.create(found.keys, demo_config(0).name)
    monkeypatch.setattr(RunFolder, "launcher_pid", lambda _: os.getpid())  # pyright: ignore
    return found


@asynccontextmanager
async def served(folder: RunFolder) -> AsyncGenerator[str]:
    name = folder.read_config().name
    verifier = Verifier.read(folder.keys, run=name, audience=Audience.DATAFLOW)
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = OperatorServer(folder=folder, verifier=verifier)
    serving = asyncio.create_task(server.serve_http("127.0.0.1", 0, None, url.set_result))
    try:
        yield await asyncio.wait_for(url, 60)
    finally:
        serving.cancel()
        await asyncio.wait([serving])


def token_of(folder: RunFolder, role: Role, name: str) -> str:
    return issue(folder, role, name=name, ttl_s=600.0)[0]


def actions(folder: RunFolder) -> list[dict[str, Any]]:
    lines = (folder.path / "admin.jsonl").read_text().splitlines()
    return [one for line in lines if (one := json.loads(line))["action"] != "token_issued"]


def test_every_action_needs_an_operator_and_a_reason() -> None:
    acting = {name for name, tool in TOOLS.items() if tool.roles == OPERATORS}
    assert acting == TOOLS.keys() - set(READING) and acting >= ACTIONS.keys()
    for name in acting:
        assert "reason" in TOOLS[name].schema["required"]


def test_the_page_and_the_skill_name_tools_that_exist() -> None:
    """Each block of docs/maintainer.md is a call that the server would accept."""
    page = Path(__file__).parents[3] / "docs" / "maintainer.md"
    blocks = [json.loads(text) for text in re.findall(r"```json\n(.*?)\n```", page.read_text())]
    calls = [block for block in blocks if "tool" in block]
    assert {block["tool"] for block in calls} == TOOLS.keys()
    for block in calls:
        arguments = {
            name: "because of this" if value == "REASON" else value
            for name, value in block["arguments"].items()
        }
        msgspec.convert(arguments, TOOLS[block["tool"]].arguments)
    skill = SKILL.read_text()
    assert all(f"`{name}`" in skill for name in TOOLS)


async def test_a_reader_sees_and_changes_nothing(folder: RunFolder) -> None:
    token = token_of(folder, Role.READER, "watcher")
    async with served(folder) as url, client(url, token) as session:
        assert [tool.name for tool in (await session.list_tools()).tools] == READING
        is_error, text = await call(session, "status")
        assert not is_error and json.loads(text)["name"] == folder.read_config().name
        for name, arguments in ACTIONS.items():
            is_error, text = await call(session, name, **arguments)
            assert is_error and "reader watcher may only read" in text
    assert not actions(folder) and folder.scale_request() is None
    assert [path.name for path in folder.path.parent.iterdir() if path.is_dir()] == ["run"]


async def test_an_operator_acts_and_the_log_says_who_and_why(folder: RunFolder) -> None:
    token = token_of(folder, Role.ADMIN, "agent-7")
    async with served(folder) as url, client(url, token) as session:
        names = [tool.name for tool in (await session.list_tools()).tools]
        assert names[:4] == READING and {*names} >= ACTIONS.keys()
        is_error, text = await call(session, "scale", to=2, reason="trainers wait\nfor data")
        assert not is_error, text
        is_error, text = await call(session, "scale", to=3)
        assert is_error and "reason" in text
        is_error, text = await call(session, "scale", to=3, reason="because it is so", when="now")
        assert is_error and "when" in text
        is_error, text = await call(session, "explode", reason="because it is so")
        assert is_error and "no tool 'explode'" in text
        revoke(folder, name="agent-7")
        with pytest.raises(MCPError):  # the list of revoked tokens is read every second
            while True:
                await call(session, "status")
        with pytest.raises(MCPError):
            await call(session, "scale", to=4, reason="it goes on after its end")
    [done] = [one for one in actions(folder) if one["action"] == "scaled"]
    assert done["who"] == "admin agent-7"
    assert done["details"]["why"] == "trainers wait for data"
    request = folder.scale_request()
    assert request is not None and (request.gpus, request.who) == (2, "admin agent-7")


@pytest.mark.parametrize("role", [None, Role.ROLLOUT, Role.TRAINER, Role.SESSION])
async def test_other_tokens_and_none_are_refused(folder: RunFolder, role: Role | None) -> None:
    token = "" if role is None else token_of(folder, role, "other")
    async with served(folder) as url, httpx2.AsyncClient(timeout=60.0) as http:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        answer = await http.post(url, json={}, headers=headers)
        assert answer.status_code == (401 if role is None else 403)
