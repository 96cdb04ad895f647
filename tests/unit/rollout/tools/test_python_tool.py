# SPDX-License-Identifier: Apache-2.0
"""The tool `python`: what the model reads of its code, whatever the code does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from tests.unit.rollout.fake_dataflow import facts

from penstock.dataflow.service.nodes.messages import ToolServerInfo
from penstock.rollout.isolation import Isolation, IsolationSettings, Use, UseSettings
from penstock.rollout.sandbox.types import Limits
from penstock.rollout.tool_sandbox import ToolSandbox
from penstock.rollout.tools.attempt_tools import Tools
from penstock.rollout.tools.python_tool import PythonSession
from penstock.rollout.tools.servers import ToolServers, open_tools
from penstock.rollout.tools.types import ToolResult
from penstock.rollout.visible_folders import interpreter_folders

MEMORY_MB = 256


class NoTurns:
    def turns(self) -> tuple[object, ...]:
        return ()


@asynccontextmanager
async def python(*, timeout_s: float = 100.0) -> AsyncGenerator[Tools]:
    limits = Limits(wall_s=1e8, memory_mb=MEMORY_MB, num_processes=64)
    settings = IsolationSettings(uses={Use.TOOLS: UseSettings(limits=limits)})
    server = ToolServerInfo(name="py", builtin="python", timeout_s=timeout_s)
    servers: ToolServers = await open_tools(facts(tools=(server,)), Isolation(settings))
    tools = servers.lease("source", "row", NoTurns())
    try:
        yield tools
    finally:
        await tools.close()
        await servers.close()


async def run(tools: Tools, code: str) -> ToolResult:
    return await tools.call({"function": {"name": "python", "arguments": {"code": code}}})


FORMATS = {
    "a bare expression": ("1 + 1", "2\n"),
    "a string is shown as its repr": ("'a' + 'b'", "'ab'\n"),
    "print": ("print('hello', 3)", "hello 3\n"),
    "print, then a bare expression": ("print('a')\n2 ** 10", "a\n1024\n"),
    "only the last expression": ("1\n2\n3", "3\n"),
    "None is not shown": ("print('x') or None", "x\n"),
    "an assignment": ("x = 5", "(no output)"),
    "a semicolon hides the value": ("5;", "(no output)"),
    "nothing": ("", "(no output)"),
    "a comment": ("# nothing", "(no output)"),
    "a loop": ("for i in range(3):\n    print(i)", "0\n1\n2\n"),
    "a function and its call": ("def f(n):\n    return n * 2\n\nf(4)", "8\n"),
    "unicode": ("'π ≈ 3'", "'π ≈ 3'\n"),
    "standard error comes in order": (
        "import sys\nprint('a')\nprint('b', file=sys.stderr)\nprint('c')",
        "a\nb\nc\n",
    ),
    "a child process": ("import subprocess\nsubprocess.run(['echo', 'hi']).returncode", "hi\n0\n"),
    "exit keeps the interpreter": ("import sys\nsys.exit(3)", "SystemExit: 3\n"),
    "bytes that are no text": ("import os\nos.write(1, b'\\xff\\n') and None", "\ufffd\n"),
    "a replaced stream": (
        "import io, sys\nold, sys.stdout = sys.stdout, io.StringIO()\nprint('lost')\n"
        "sys.stdout = old\nprint('kept')",
        "kept\n",
    ),
    "a class of the code can be copied": (
        "import pickle\nclass A:\n    n = 1\npickle.loads(pickle.dumps(A())).n",
        "1\n",
    ),
}


async def test_output_is_formatted_as_in_a_notebook() -> None:
    """Each case after the other in one interpreter, as a model would."""
    async with python() as tools:
        found = {name: (await run(tools, code)).text for name, (code, _) in FORMATS.items()}
    assert found == {name: text for name, (_, text) in FORMATS.items()}


async def test_variables_stay_and_errors_show_the_code_of_the_model_only() -> None:
    async with python() as tools:
        assert (await run(tools, "import math\nx = 41")).text == "(no output)"
        failed = await run(tools, "x += 1\nprint(x)\nmath.sqrt(-1)")
        assert failed.is_error and failed.text.startswith("42\nTraceback (most recent call last):")
        assert "math.sqrt(-1)" in failed.text and "ValueError" in failed.text
        assert "python_driver" not in failed.text and "runcode" not in failed.text
        wrong = await run(tools, "if True print(1)")
        assert wrong.is_error and "SyntaxError" in wrong.text
        assert (await run(tools, "x")).text == "42\n", "an error loses nothing"


async def test_numpy_and_sympy_can_be_imported() -> None:
    async with python() as tools:
        code = "import numpy as np, sympy\nint(np.arange(4).sum()), sympy.factorint(60)"
        assert (await run(tools, code)).text == "(6, {2: 2, 3: 1, 5: 1})\n"


async def test_an_endless_loop_is_interrupted_and_keeps_its_variables() -> None:
    """Without the deadline of a call, which a slow machine may reach first."""
    session = PythonSession(ToolSandbox(Isolation(), "", interpreter_folders()), 1.0)
    try:
        await session.call("python", {"code": "x = 7"})
        looped = await session.call("python", {"code": "while True:\n    pass"})
        assert looped.is_error and "TimeLimit" in looped.text
        assert (await session.call("python", {"code": "x"})).text == "7\n"
    finally:
        await session.close()


async def test_a_loop_that_catches_everything_is_killed() -> None:
    async with python(timeout_s=2.0) as tools:
        loop = ["while True:", " try:", "  while True:", "   pass", " except BaseException:", "  1"]
        code = "\n".join(loop)
        looped = await run(tools, code)
        assert looped.is_error and "did not answer within 2 s" in looped.text


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("x = bytearray(1 << 33)", "memory"),
        ("import os\nos._exit(3)", "ended with code 3"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "started again"),
        ("import os\nos.closerange(3, 20)", ""),
        (
            "import os\nfor fd in range(3, 20):\n    try:\n        os.write(fd, b'\\xff' * 64)\n"
            "    except OSError:\n        pass",
            "",
        ),
    ],
)
async def test_code_that_breaks_its_interpreter_gets_a_new_one(code: str, says: str) -> None:
    async with python() as tools:
        broken = await run(tools, code)
        assert says in broken.text.lower() or broken.is_error, broken
        await run(tools, "1")  # the damage may show one call later
        assert (await run(tools, "6 * 7")).text == "42\n"
        assert len(tools.uses) == 3


async def test_memory_beyond_the_limit_ends_the_code_and_not_the_node() -> None:
    async with python() as tools:
        bomb = await run(tools, "x = []\nwhile True:\n    x.append(bytearray(1 << 22))")
        assert bomb.is_error and "memory" in bomb.text.lower()
        assert (await run(tools, "1")).text == "1\n"


async def test_a_flood_of_output_is_cut_in_the_middle() -> None:
    async with python() as tools:
        code = "print('begin')\nfor _ in range(3000):\n    print('x' * 30000)\nprint('end')"
        flood = await run(tools, code)
        assert flood.text.startswith("begin\n") and flood.text.endswith("end\n")
        assert len(flood.text) <= 8000 and "cut" in flood.text
        assert (await run(tools, "1")).text == "1\n"


async def test_calls_at_the_same_time_run_one_after_another() -> None:
    async with python() as tools:
        await run(tools, "x = 0")
        await asyncio.gather(*(run(tools, "x += 1") for _ in range(8)))
        assert (await run(tools, "x")).text == "8\n"
        assert len(tools.uses) == 10
