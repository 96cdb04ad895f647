# SPDX-License-Identifier: Apache-2.0
"""Starts the program of a workflow where it reaches the gateway and nothing else.

Inside a sandbox without a network, a port of 127.0.0.1 leads to the gateway's unix socket, so that
an unmodified client works. Owns the addresses in the program's environment: for OpenAI and
Anthropic clients, and in PENSTOCK_ROLE_URLS a base URL for each role of the run, as JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.rollout.endpoint import Endpoint, role_url
from penstock.rollout.isolation import Isolation, Use
from penstock.rollout.programs import run_program
from penstock.rollout.sandbox.types import Level
from penstock.rollout.visible_folders import program_folders, python_folders

GATEWAY = "gateway"
"""The name of its socket inside."""
PORT = 18000
"""Of 127.0.0.1 inside; nothing else listens there."""


async def run_agent(
    isolation: Isolation,
    endpoint: Endpoint,
    api_key: str,
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    roles: Sequence[str] = (),
    role: str = "",
    row_id: str,
    stdin: bytes = b"",
    timeout_s: float | None = None,
) -> str:
    """Run a program whose OpenAI or Anthropic client calls the gateway with this key; returns its
    standard output. `roles`: all roles of the run. `role`: who calls, whatever model it names."""
    has_network = (await isolation.backend(Use.WORKFLOW)).level < Level.NAMESPACES
    base_url = endpoint.url if has_network else f"http://127.0.0.1:{PORT}/v1"
    sandbox = await isolation.open(
        Use.WORKFLOW,
        folders=(*program_folders(argv), *python_folders()),
        sockets=dict[str, Path]() if has_network else {GATEWAY: endpoint.socket_path},
        env=_environment(base_url, api_key, roles, role) | dict(env),
        row_id=row_id,
    )
    ports = {} if has_network else {PORT: f"/run/sockets/{GATEWAY}"}
    return await run_program(sandbox, argv, ports=ports, stdin=stdin, timeout_s=timeout_s)


def _environment(base_url: str, api_key: str, roles: Sequence[str], role: str) -> dict[str, str]:
    passed = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    if roles:
        urls = {name: role_url(base_url, name) for name in roles}
        passed["PENSTOCK_ROLE_URLS"] = json.dumps(urls)
    return {**passed, **client_env(role_url(base_url, role) if role else base_url, api_key)}


def client_env(base_url: str, api_key: str) -> dict[str, str]:
    """What makes unmodified clients call the gateway."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }
