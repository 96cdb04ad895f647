# SPDX-License-Identifier: Apache-2.0
"""MCP servers that hang, flood, die or lie: each call ends in a text, and the episode goes on."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.unit.rollout.fake_dataflow import facts

from penstock.dataflow.service.nodes.messages import SourceInfo, ToolServerInfo
from penstock.errors import ConfigError
from penstock.rollout.isolation import Isolation
from penstock.rollout.tools import servers as servers_module
from penstock.rollout.tools.attempt_tools import Tools
from penstock.rollout.tools.catalog import MAX_DESCRIPTION_CHARS, MAX_TOOLS
from penstock.rollout.tools.servers import ToolServers, open_tools
from penstock.rollout.tools.types import ToolResult
from penstock.types import SamplingSpec

SERVER = str(Path(__file__).with_name("hostile_server.py"))


class Turns:
    def __init__(self, number: int = 0) -> None:
        self._number = number

    def turns(self) -> tuple[object, ...]:
        return (None,) * self._number


def server(kind: str, *, timeout_s: float = 100.0, is_shared: bool = False) -> ToolServerInfo:
    return ToolServerInfo(
        name=kind,
        command=(sys.executable, "-S", SERVER, kind),
        timeout_s=timeout_s,
        is_shared=is_shared,
        max_result_chars=500,
    )


@asynccontextmanager
async def opened(*given: ToolServerInfo) -> AsyncGenerator[ToolServers]:
    servers = await open_tools(facts(tools=given), Isolation())
    try:
        yield servers
    finally:
        await servers.close()


@asynccontextmanager
async def leased(*given: ToolServerInfo) -> AsyncGenerator[Tools]:
    async with opened(*given) as servers:
        tools = servers.lease("source", "row", Turns(3))
        try:
            yield tools
        finally:
            await tools.close()


async def echo(tools: Tools, text: str, name: str = "echo") -> ToolResult:
    return await tools.call({"function": {"name": name, "arguments": {"text": text}}})


async def test_a_call_is_answered_and_recorded() -> None:
    async with leased(server("good")) as tools:
        [spec] = tools.specs
        assert spec["type"] == "function" and spec["function"]["name"] == "echo"
        assert (await echo(tools, "hello")).text == "hello"
        [use] = tools.uses
        assert (use.turn, use.name, use.arguments) == (2, "echo", '{"text": "hello"}')
        assert (use.result, use.is_error) == ("hello", False) and use.seconds > 0


FAULTS = {
    "flood": "more than",
    "chatter": "not MCP messages",
    "die": "ended with code 7: out of order",
    "garbage": "wrong answer",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_server_that_breaks_is_an_error_text_and_is_started_again(fault: str) -> None:
    async with leased(server("good")) as tools:
        broken = await echo(tools, fault)
        assert broken.is_error and FAULTS[fault] in broken.text, broken
        assert await echo(tools, "again") == ToolResult(text="again")
        assert [use.is_error for use in tools.uses] == [True, False]


async def test_a_server_that_hangs_is_ended_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.rollout.tools.mcp_session.PING_S", 0.5)
    async with leased(server("good", timeout_s=3.0)) as tools:
        hung = await echo(tools, "hang")
        assert hung.is_error and "did not answer within 3 s" in hung.text
    async with leased(server("good")) as tools:
        assert (await echo(tools, "noise")).text == "noise", "other lines are skipped"
        refused = await echo(tools, "error")
        assert refused.is_error and refused.text == "no such thing"
        other = await echo(tools, "other")
        assert other.text == "[image: not text]\nand text" and other.cost == 2.5
        assert tools.uses[-1].cost == 2.5
        long = await echo(tools, "a" * 400 + "b" * 5000)
        assert len(long.text) <= 500 and "cut" in long.text and long.text.endswith("bbb")


async def test_arguments_of_a_model_never_raise() -> None:
    async with leased(server("good")) as tools:
        wrong = {
            '{"text": 3}': "3 is not of type 'string'",
            "{}": "'text' is a required property",
            "[1]": "must be a JSON object",
            "{": "not valid JSON",
            '{"text": NaN}': "not valid JSON: NaN",
            "[" * 100_000: "not valid JSON",
            '{"text": "\\ud800"}': "",
        }
        for arguments, says in wrong.items():
            result = await tools.call({"function": {"name": "echo", "arguments": arguments}})
            assert says in result.text and result.is_error == bool(says), (arguments[:20], result)
        for call in ({}, {"function": 3}, {"name": None}, {"function": {"name": "nope"}}):
            result = await tools.call(call)
            assert result.is_error and "there is no tool" in result.text
        assert len(tools.uses) == 11


async def test_what_a_server_lists_is_bounded() -> None:
    async with opened(server("many"), server("giant"), server("endless")) as servers:
        by_server = [tool.server for tool in servers.catalog.tools]
        assert by_server.count("many") == MAX_TOOLS
        [giant] = [tool for tool in servers.catalog.tools if tool.server == "giant"]
        assert len(giant.spec.description) == MAX_DESCRIPTION_CHARS
        assert by_server.count("endless") == 1
        said = "\n".join(servers.catalog.notes)
        assert "more than 128 tools" in said and "'huge', which is left out" in said


async def test_schemas_may_be_recursive_or_wrong() -> None:
    async with leased(server("recursive")) as tools:
        call = {"name": "tree", "arguments": {"left": {"left": {"loop": 1}}}}
        assert (await tools.call({"function": call})).text == "", "the server decides"
    async with opened(server("schemas")) as servers:
        names = [tool.name for tool in servers.catalog.tools]
        assert names == ["echo", "wrong2"] and len(servers.catalog.notes) == 2
        tools = servers.lease("source", "row", Turns())
        assert not (await tools.call({"name": "wrong2", "arguments": {}})).is_error
        await tools.close()


async def test_names_are_valid_for_models_and_unique() -> None:
    async with opened(server("names"), server("good"), server("other")) as servers:
        names = [tool.name for tool in servers.catalog.tools]
        assert names == ["a_b", "_" * 64, "tool", "good_echo", "other_echo"]
        tools = servers.lease("source", "row", Turns())
        assert (await echo(tools, "x", "other_echo")).text == "x"
        await tools.close()


async def test_a_shared_server_outlives_an_attempt() -> None:
    async with opened(server("good", is_shared=True)) as servers:
        first, second = (servers.lease("source", row, Turns()) for row in ("a", "b"))
        assert (await echo(first, "x")).text == "x"
        await first.close()
        assert (await echo(second, "y")).text == "y"
        assert len(first.uses) == len(second.uses) == 1


async def test_a_source_has_the_tools_that_it_names() -> None:
    source = SourceInfo(
        name="few", workflow="single_turn", reward="", sampling=SamplingSpec(), tools=("good",)
    )
    none = SourceInfo(
        name="none", workflow="single_turn", reward="", sampling=SamplingSpec(), tools=()
    )
    info = facts(tools=(server("good"), server("recursive")), sources=(source, none))
    servers = await open_tools(info, Isolation())
    counts = {name: len(servers.lease(name, "r", Turns()).specs) for name in ("few", "none", "all")}
    assert counts == {"few": 1, "none": 0, "all": 3}
    await servers.close()


@pytest.mark.parametrize(("kind", "says"), [("absent", "cannot start"), ("silent", "within 1 s")])
async def test_a_server_that_does_not_start_ends_the_node(
    kind: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "silent":
        monkeypatch.setattr(servers_module, "LIST_S", 1.0)
    with pytest.raises(ConfigError, match=rf"tools\.{kind}: .*{says}"):
        await open_tools(facts(tools=(server(kind),)), Isolation())
