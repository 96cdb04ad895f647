# SPDX-License-Identifier: Apache-2.0
"""Whether the tool servers of a run start here, and what they offer, for `penstock check`.

Owns the wording. Starts each server once, as a node does, and ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from penstock.config import RunConfig, ToolServerConfig
from penstock.dataflow.service.build import run_info
from penstock.errors import ConfigError, SandboxError
from penstock.rollout.isolation import Isolation
from penstock.rollout.tools.catalog import Catalog
from penstock.rollout.tools.servers import open_tools
from penstock.runs.check_problem import CheckProblem
from penstock.runs.sandbox_settings import isolation_settings


def missing_tool_packages(config: RunConfig) -> Iterator[CheckProblem]:
    """Packages of the extra `tools` that the servers of this run need."""
    needed = {name for server in config.tools.values() for name in _packages(server)}
    missing = sorted(name for name in needed if find_spec(name) is None)
    if missing:
        text = f"not installed: {', '.join(missing)}; run: pip install 'penstock-rl[tools]'"
        yield CheckProblem(key="tools", text=text)


def _packages(server: ToolServerConfig) -> Iterator[str]:
    yield "jsonschema"
    if server.command or server.url:
        yield "mcp"
    if server.builtin == "search":
        yield "bm25s"


@dataclass(frozen=True, slots=True)
class ToolsReport:
    problems: tuple[CheckProblem, ...] = ()
    notes: tuple[str, ...] = ()


def check_tools(config: RunConfig, folder: Path) -> ToolsReport:
    """Start every server of the run, and list its tools."""
    if not config.tools or [*missing_tool_packages(config)]:
        return ToolsReport()
    return asyncio.run(_check(config, folder))


async def _check(config: RunConfig, folder: Path) -> ToolsReport:
    info = run_info(config)
    isolation = Isolation(isolation_settings(config, folder))
    problems, notes = list[CheckProblem](), list[str]()
    for server in info.tools:
        try:
            opened = await open_tools(replace(info, tools=(server,)), isolation)
        except (ConfigError, SandboxError) as error:
            text = str(error).removeprefix(f"tools.{server.name}: ")
            problems.append(CheckProblem(key=f"tools.{server.name}", text=text))
            continue
        await opened.close()
        notes += _describe(server.name, opened.catalog)
    return ToolsReport(tuple(problems), tuple(notes))


def _describe(name: str, catalog: Catalog) -> Iterator[str]:
    offered = ", ".join(tool.spec.name for tool in catalog.tools) or "nothing"
    yield f"tools.{name} offers {offered}"
    yield from catalog.notes
