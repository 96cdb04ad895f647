# SPDX-License-Identifier: Apache-2.0
"""`tools:` of a run file: what is accepted, what a node gets of it, and what its machine grants."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config import RunConfig, dump
from penstock.dataflow.service.build import run_info
from penstock.errors import ConfigError
from penstock.rollout.isolation import Isolation, Use
from penstock.runs.sandbox_settings import isolation_settings

LoadText = Callable[..., RunConfig]
RUN = """\
name: tools
models: {policy: {init: builtin:tiny-qwen3}}
training: {steps: 1}
sources:
  - {name: all, task: penstock.tasks.reverse}
  - {name: some, task: penstock.tasks.reverse, tools: [py]}
reward: rewards:shared
sandbox: {servers: {hosts: ["127.0.0.1:8000"]}}
tools:
  py: {builtin: python, timeout_s: 5}
  wiki: {builtin: search, folder: corpus}
  git: {command: [git-mcp, --read-only], lease: node}
  near: {url: "http://127.0.0.1:8000/mcp"}
  far: {url: "https://tools.example.com/mcp", token: key, max_result_chars: 100}
"""


def test_a_node_gets_the_servers_and_each_source_its_own(load_text: LoadText) -> None:
    config = load_text(RUN)
    info = run_info(config)
    assert [(s.name, s.is_shared) for s in info.tools] == [
        ("py", False),
        ("wiki", True),
        ("git", True),
        ("near", False),
        ("far", False),
    ]
    assert info.tools[2].command == ("git-mcp", "--read-only") and info.tools[4].token == "key"
    assert [(s.name, s.tools) for s in info.sources] == [("some", ("py",))]
    assert load_text(dump(config)) == config


def test_the_owner_s_machine_grants_what_the_file_names_but_no_address(
    load_text: LoadText, tmp_path: Path
) -> None:
    settings = isolation_settings(load_text(RUN), tmp_path / "run")
    isolation = Isolation(settings)
    assert isolation.tool_grants.hosts == ("tools.example.com", "127.0.0.1:8000")
    assert isolation.tool_grants.folders == (Path("corpus").absolute(),)
    programs = settings.uses[Use.SERVERS].grants
    assert programs.hosts == ("127.0.0.1:8000",), "a program reaches what is granted to programs"
    assert programs.folders == ()
    without = RUN.replace('sandbox: {servers: {hosts: ["127.0.0.1:8000"]}}\n', "")
    isolation = Isolation(isolation_settings(load_text(without), tmp_path / "run"))
    assert isolation.tool_grants.hosts == ("tools.example.com",)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ("{}", "exactly one of command"),
        ("{builtin: python, url: 'http://a.example/x'}", "exactly one of command"),
        ("{builtin: search}", "add folder: PATH"),
        ("{builtin: python, folder: x}", "folder belongs to builtin: search"),
        ("{builtin: files, lease: node}", "remove lease: node"),
        ("{command: [x], token: y}", "token belongs to url"),
        ("{url: 'file:///etc/passwd'}", "is not a URL"),
        ("{builtin: shell}", "python"),
        ("{builtin: python, timeout_s: 0}", "timeout_s"),
    ],
)
def test_a_wrong_server_is_refused_with_the_fix(
    server: str, says: str, load_text: LoadText
) -> None:
    head = RUN[: RUN.index("  py:")].replace("tools: [py]", "tools: [x]")
    with pytest.raises(ConfigError) as caught:
        load_text(f"{head}  x: {server}\n")
    assert says in str(caught.value)


def test_a_source_cannot_name_an_unknown_server(load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match='unknown tool server "pyt"'):
        load_text(RUN.replace("tools: [py]", "tools: [pyt]"))
