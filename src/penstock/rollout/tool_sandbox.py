# SPDX-License-Identifier: Apache-2.0
"""`ctx.sandbox` and `ctx.grade`: code that a model wrote, as a workflow runs it.

Owns one sandbox per attempt, started when it is first used. A program that fails is a result; a
sandbox that fails raises SandboxError, which ends the attempt without a reward."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.rollout.grading.grader import grade
from penstock.rollout.grading.types import GradingLimits, Solution, TestFile, Verdict
from penstock.rollout.isolation import Isolation, Opened, Use
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.types import CommandRefused, Limits, Sandbox
from penstock.rollout.visible_folders import interpreter_folders

CANNOT_START = 126
"""As shells say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """How a program in the sandbox ended."""

    code: int
    """0 if it says that it succeeded; negative if a signal ended it."""
    stdout: str
    """The last MiB of it."""
    stderr: str
    """The last MiB of it."""
    limit: str = ""
    """The limit that ended it, such as `wall_s` or `memory_mb`; empty if none did."""


@dataclass(slots=True)
class ToolSandbox:
    """A folder of files and the programs in it. Neither network nor files of this machine, except
    what `sandbox.tools` in the run file grants."""

    _isolation: Isolation
    _row_id: str = ""
    _folders: tuple[Path, ...] = ()
    """Of this machine, which its programs see; read-only."""
    _opened: Opened | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: str | bytes = b"",
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> ProgramResult:
        """Run a program to its end; its descendants end with it. A program beyond `timeout_s` ends
        with the limit `wall_s`, and the files of the sandbox with it. Words that no program can be
        started with, such as ones with a NUL, end with code 126."""
        box = await self.started()
        data = stdin.encode(errors="replace") if isinstance(stdin, str) else stdin
        try:
            async with asyncio.timeout(timeout_s):
                done = await run(box, argv, stdin=data, env=env or {})
        except TimeoutError:
            await self.close()
            return ProgramResult(code=-9, stdout="", stderr="", limit="wall_s")
        except CommandRefused as error:
            return ProgramResult(code=CANNOT_START, stdout="", stderr=str(error))
        return ProgramResult(
            code=done.exit.code,
            stdout=done.stdout.decode(errors="replace"),
            stderr=done.stderr.decode(errors="replace"),
            limit=done.exit.limit,
        )

    async def put(self, path: str, data: bytes) -> None:
        """Write a file, by its path in the folder of the sandbox."""
        await (await self.started()).put(path, data)

    async def get(self, path: str, *, max_bytes: int = 1 << 20) -> bytes:
        """Read a file. Raises ValueError if it is missing, a link or too long."""
        return await (await self.started()).get(path, max_bytes=max_bytes)

    async def close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            await opened.close()

    async def started(self) -> Sandbox:
        """The sandbox, started if it is not."""
        async with self._lock:
            if self._opened is None:
                box = await self._isolation.open(
                    Use.TOOLS, folders=self._folders, row_id=self._row_id
                )
                opened = Opened(box)
                await opened.__aenter__()
                self._opened = opened
            return self._opened.box


async def grade_solution(
    isolation: Isolation,
    solution: str,
    tests: str,
    *,
    ids: Sequence[str],
    limits: GradingLimits | None = None,
) -> Verdict:
    """Grade a solution of one Python file with this interpreter and its packages."""

    async def make(bounds: Limits) -> Sandbox:
        return await isolation.open(Use.TOOLS, folders=interpreter_folders(), limits=bounds)

    return await grade(
        make,
        Solution.of(solution),
        TestFile(source=tests, ids=frozenset(ids)),
        python=sys.executable,
        limits=limits,
    )
