# SPDX-License-Identifier: Apache-2.0
"""The tool servers of a node: started once to list their tools, then leased to attempts.

Owns who shares a server: an attempt has its own, or all attempts of the node have one. A node
grants nothing because a run asks for it: folders, hosts and secrets are its own machine's grants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog

from penstock.dataflow.service.nodes.messages import RunInfo, ToolServerInfo
from penstock.errors import ConfigError
from penstock.rollout.egress.rules import Denied
from penstock.rollout.isolation import Isolation, Use
from penstock.rollout.tool_sandbox import ToolSandbox
from penstock.rollout.tools.attempt_tools import Tools
from penstock.rollout.tools.catalog import Catalog, make_catalog
from penstock.rollout.tools.types import ToolFailed, ToolSession, ToolSpec
from penstock.rollout.visible_folders import interpreter_folders

LIST_S = 120.0
"""For starting a server and listing its tools."""
IN_SANDBOX = ("python", "files")
"""Built-in tools that work in the sandbox of the attempt."""
log = structlog.get_logger(__name__)


class Turns(Protocol):
    def turns(self) -> Sequence[object]: ...


@dataclass(slots=True)
class ToolServers:
    """What attempts of this node can call; without `tools:` in the run file, nothing."""

    catalog: Catalog = field(default_factory=Catalog)
    _servers: Mapping[str, ToolServerInfo] = field(default_factory=dict[str, ToolServerInfo])
    _by_source: Mapping[str, tuple[str, ...] | None] = field(
        default_factory=dict[str, tuple[str, ...] | None]
    )
    """Where a source has fewer than the run."""
    _isolation: Isolation | None = None
    _shared: Mapping[str, ToolSession] = field(default_factory=dict[str, ToolSession])

    def lease(self, source: str, row_id: str, session: Turns) -> Tools:
        """The tools of one attempt, until it closes them."""
        allowed = self._by_source.get(source)
        servers = [s for s in self._servers.values() if allowed is None or s.name in allowed]
        if not servers:
            return Tools()
        assert self._isolation is not None
        sandbox = _sandbox(servers, self._isolation, row_id)
        sessions = dict[str, ToolSession]()
        for server in servers:
            shared = self._shared.get(server.name)
            sessions[server.name] = shared or open_session(
                server, self._isolation, sandbox, row_id=row_id
            )
        return Tools(
            [tool for tool in self.catalog.tools if tool.server in sessions],
            sessions,
            owned=[server.name for server in servers if not server.is_shared],
            sandbox=sandbox,
            last_turn=lambda: len(session.turns()) - 1,
        )

    async def close(self) -> None:
        """End the shared servers."""
        await asyncio.gather(*(session.close() for session in self._shared.values()))


def _sandbox(
    servers: Sequence[ToolServerInfo], isolation: Isolation, row_id: str
) -> ToolSandbox | None:
    kinds = {server.builtin for server in servers}
    if not kinds & set(IN_SANDBOX):
        return None
    return ToolSandbox(isolation, row_id, interpreter_folders() if "python" in kinds else ())


async def open_tools(run_info: RunInfo, isolation: Isolation) -> ToolServers:
    """Start each server of the run once and list its tools. Raises ConfigError if one does not
    answer or is not granted here, SandboxError if there is no sandbox for one."""
    servers = run_info.tools
    if not servers:
        return ToolServers()
    listing = [_list(server, isolation) for server in servers]
    results = await asyncio.gather(*listing, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    opened = [result for result in results if not isinstance(result, BaseException)]
    shared = {server.name: session for server, session, _ in opened if server.is_shared}
    if failed:
        await asyncio.gather(*(session.close() for session in shared.values()))
        raise failed[0]
    catalog = make_catalog(servers, {server.name: specs for server, _, specs in opened})
    for note in catalog.notes:
        log.warning("tools", note=note)
    return ToolServers(
        catalog,
        {server.name: server for server in servers},
        {source.name: source.tools for source in run_info.sources},
        isolation,
        shared,
    )


async def _list(
    server: ToolServerInfo, isolation: Isolation
) -> tuple[ToolServerInfo, ToolSession, Sequence[ToolSpec]]:
    if server.builtin in IN_SANDBOX:
        await isolation.backend(Use.TOOLS)
    sandbox = _sandbox([server], isolation, "")
    session = open_session(server, isolation, sandbox)
    is_kept = False
    try:
        async with asyncio.timeout(LIST_S):
            specs = await session.list()
        is_kept = server.is_shared
    except ToolFailed as failure:
        fix = "try it with `penstock check`, and look at the program or URL in the run file"
        raise ConfigError(f"tools.{server.name}: {failure}; {fix}") from None
    except TimeoutError:
        why = f"it did not list its tools within {LIST_S:g} s; look at the program or URL"
        raise ConfigError(f"tools.{server.name}: {why} in the run file") from None
    finally:
        if not is_kept:
            await session.close()
    return server, session, specs


def open_session(
    server: ToolServerInfo,
    isolation: Isolation,
    sandbox: ToolSandbox | None,
    *,
    row_id: str = "",
) -> ToolSession:
    """A session that starts when it is first used. Raises ConfigError for what this machine does
    not grant."""
    if server.command or server.url:
        return _mcp_session(server, isolation, row_id)
    if server.builtin == "search":
        from penstock.rollout.tools.search_tool import SearchSession

        return SearchSession(_granted_folder(server, isolation))
    if server.builtin == "python" and sandbox is not None:
        from penstock.rollout.tools.python_tool import PythonSession

        return PythonSession(sandbox, server.timeout_s)
    if server.builtin == "files" and sandbox is not None:
        from penstock.rollout.tools.file_tools import FileSession

        return FileSession(sandbox.started)
    raise ConfigError(
        f"tools.{server.name}.builtin is {server.builtin!r}, which this node does not have; "
        "install the release of penstock that the run uses"
    )


def _mcp_session(server: ToolServerInfo, isolation: Isolation, row_id: str) -> ToolSession:
    from penstock.rollout.tools.mcp_session import McpSession

    if server.command:
        from penstock.rollout.tools.stdio import StdioServer

        program = StdioServer(
            isolation=isolation,
            argv=server.command,
            row_id=row_id,
            is_shared=server.is_shared,
        )
        return McpSession(server.name, program.connect)
    from penstock.rollout.tools.http import HttpServer, check_url, secret_file

    hosts = isolation.tool_grants.hosts
    secrets = isolation.settings_of(Use.SERVERS).grants.secrets
    try:
        check_url(server.url, hosts)
    except Denied as error:
        fix = "add HOST:PORT under sandbox.servers.hosts of this machine's run file"
        raise ConfigError(f"tools.{server.name}.url {server.url!r}: {error}; {fix}") from None
    endpoint = HttpServer(
        url=server.url,
        hosts=hosts,
        timeout_s=server.timeout_s,
        token_file=secret_file(secrets, server.token, server.name) if server.token else None,
    )
    return McpSession(server.name, endpoint.connect)


def _granted_folder(server: ToolServerInfo, isolation: Isolation) -> Path:
    folder = Path(server.folder).expanduser().absolute()
    granted = isolation.tool_grants.folders
    if not any(folder.resolve().is_relative_to(path.resolve()) for path in granted):
        raise ConfigError(
            f"tools.{server.name}.folder {folder} is not granted on this machine; add it under "
            "sandbox.servers.folders"
        )
    return folder
