# SPDX-License-Identifier: Apache-2.0
"""The built-in tool `python`: code that a model wrote, in the sandbox of its attempt.

Owns one interpreter, whose variables stay until it ends, and what is said when it ends: at a
limit, by the code itself or at the deadline. Code never runs outside of a sandbox that holds.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Protocol

from penstock.errors import BadRequest
from penstock.rollout.sandbox.types import Sandbox, SandboxProcess
from penstock.rollout.tools.types import ToolFailed, ToolResult, ToolSpec
from penstock.wire.json_parts import require_few_parts

PYTHON = ToolSpec(
    name="python",
    description="Run Python code and return what it prints. The value of a bare last expression "
    "is printed too. Variables, imports and files stay for later calls. There is no network. "
    "numpy and sympy can be imported.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source code."}},
        "required": ["code"],
    },
)
MAX_ANSWER_BYTES = 4 << 20
PREFIX_BYTES = 4
_ENV = {"MPLBACKEND": "Agg", "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
_CODE_SHARE = 0.8
"""Of the time of a call; the rest is for starting the interpreter and for its answer."""
_LOST = "the interpreter was started again, without earlier variables"


class Box(Protocol):
    """A sandbox that is started when it is first needed; see `ToolSandbox`."""

    async def started(self) -> Sandbox: ...
    async def close(self) -> None: ...


@dataclass(slots=True)
class PythonSession:
    """A ToolSession."""

    _box: Box
    """Must show this interpreter."""
    _timeout_s: float
    """Of a call. Code that still runs shortly before is interrupted, and keeps its variables."""
    _process: SandboxProcess | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def list(self) -> Sequence[ToolSpec]:
        return (PYTHON,)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        async with self._lock:  # one after another: they share variables
            process = await self._started()
            try:
                answer = await self._ask(process, str(arguments["code"]))
            except (asyncio.IncompleteReadError, OSError, ValueError):
                raise ToolFailed(await self._how_it_ended(process)) from None
            text = str(answer.get("text", ""))
            return ToolResult(text=text or "(no output)", is_error=bool(answer.get("is_error")))

    async def recover(self) -> None:
        await self.close()

    async def close(self) -> None:
        """The files of the sandbox end with it."""
        if self._process is not None:
            self._process = None
            await self._box.close()

    async def _started(self) -> SandboxProcess:
        if self._process is None:
            box = await self._box.started()
            script = resources.files("penstock.rollout.tools").joinpath("python_driver.py")
            argv = [sys.executable, "-I", "-u", "-X", "utf8", "-c", script.read_text()]
            self._process = await box.exec(argv, env=_ENV)
        return self._process

    async def _ask(self, process: SandboxProcess, code: str) -> dict[str, Any]:
        body = json.dumps({"code": code, "timeout_s": _CODE_SHARE * self._timeout_s}).encode()
        process.stdin.write(len(body).to_bytes(PREFIX_BYTES, "little") + body)
        await process.stdin.drain()
        num_bytes = int.from_bytes(await process.stdout.readexactly(PREFIX_BYTES), "little")
        if num_bytes > MAX_ANSWER_BYTES:
            raise ValueError("an answer that the driver does not give")
        body = await process.stdout.readexactly(num_bytes)
        try:
            require_few_parts(body)
            answer: Any = json.loads(body)
        except (BadRequest, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise ValueError("an answer that the driver does not give")
        return answer  # pyright: ignore[reportUnknownVariableType] - read with defaults

    async def _how_it_ended(self, process: SandboxProcess) -> str:
        """Ends what is left of it, and says why."""
        ended = None
        try:
            async with asyncio.timeout(1.0):
                ended = await process.wait()
        except TimeoutError:
            pass
        await self.close()
        if ended is None:
            return f"the code took over its interpreter; {_LOST}"
        how = f"at its limit {ended.limit}" if ended.limit else f"with code {ended.code}"
        return f"the interpreter ended {how}; {_LOST}"
