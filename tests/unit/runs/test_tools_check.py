# SPDX-License-Identifier: Apache-2.0
"""`penstock check` starts each tool server once: what it offers, or why it does not."""

from __future__ import annotations

import sys
from pathlib import Path

from penstock.config import demo_config
from penstock.config.tools import ToolServerConfig
from penstock.runs.tools_check import check_tools

SERVER = str(Path(__file__).parents[1] / "rollout" / "tools" / "hostile_server.py")


def test_each_server_is_listed_or_is_a_problem(tmp_path: Path) -> None:
    def program(kind: str) -> ToolServerConfig:
        return ToolServerConfig(command=(sys.executable, "-S", SERVER, kind))

    servers = {
        "py": ToolServerConfig(builtin="python"),
        "good": program("good"),
        "absent": program("absent"),
        "near": ToolServerConfig(url="http://127.0.0.1:1/mcp"),
        "docs": ToolServerConfig(builtin="search", folder=str(tmp_path)),
    }
    config = demo_config(0).model_copy(update={"tools": servers})
    report = check_tools(config, tmp_path / "runs" / "run")
    assert report.notes == ("tools.py offers python", "tools.good offers echo")
    found = {problem.key: problem.text for problem in report.problems}
    assert "cannot start" in found["tools.absent"]
    assert "127.0.0.1:1 is not granted" in found["tools.near"]
    assert "has no .txt, .md, .jsonl file" in found["tools.docs"] and len(found) == 3
