# SPDX-License-Identifier: Apache-2.0
"""Log lines, as a process of its own writes them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from io import StringIO

import structlog

from penstock.observe import logs

SCRIPT = """
import logging, structlog
from penstock.observe import logs
logs.configure("dataflow")
structlog.get_logger("x").info("sealed", seq=3)
structlog.get_logger("x").debug("hidden")
logging.getLogger("uvicorn.error").warning("from a %s", "library")
logging.getLogger("httpx2").info("GET /v1/status 200")
try:
    1 / 0
except ZeroDivisionError:
    structlog.get_logger("x").exception("broke")
"""


def test_every_line_is_json_with_service_and_level() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == ""
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["service"], line["level"], line["msg"]) for line in lines] == [
        ("dataflow", "info", "sealed"),
        ("dataflow", "warning", "from a library"),
        ("dataflow", "error", "broke"),
    ]
    assert lines[0]["seq"] == 3
    assert "ZeroDivisionError: division by zero" in lines[2]["exception"]


def test_a_terminal_gets_a_readable_form() -> None:
    reader, writer = pty.openpty()
    subprocess.run([sys.executable, "-c", SCRIPT], stderr=writer, timeout=300, check=True)
    os.close(writer)
    text = os.read(reader, 65536).decode()
    os.close(reader)
    assert "sealed" in text
    assert not text.startswith("{")


def test_level_is_respected() -> None:
    out = StringIO()
    logs.configure("node-0", level="error", stream=out)
    structlog.get_logger("x").warning("no")
    structlog.get_logger("x").error("yes")
    assert [json.loads(line)["msg"] for line in out.getvalue().splitlines()] == ["yes"]
