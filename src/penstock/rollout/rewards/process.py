# SPDX-License-Identifier: Apache-2.0
"""The node's handle on one reward worker: start, score, kill. Owns the process in its sandbox;
knows nothing of batching."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass, field

import msgspec

from penstock.errors import RewardError
from penstock.redaction import hide_secrets
from penstock.rollout.isolation import Isolation, Use
from penstock.rollout.rewards.frames import (
    ANSWERS,
    MAX_ANSWER_BYTES,
    PREFIX_BYTES,
    ScoreAnswer,
    ScoreRequest,
    frame_bytes,
    pack,
)
from penstock.rollout.sandbox.types import ReadStream, Sandbox, SandboxProcess
from penstock.rollout.visible_folders import module_files, python_folders

START_S = 120.0
"""How long the user's module may take to import; some load a computer algebra system."""
_MAX_LINE_BYTES = 1 << 16
MAX_LOG_BYTES = 256 << 10
LOG_BYTES_PER_S = 1 << 10
"""What a reward prints goes to the node's log: at most this much at once, and on average. Hiding
secrets in it takes the node's time, about 0.2 s per MB."""


@dataclass(slots=True)
class LogBudget:
    """Bounds what a worker, over all its processes, writes to the node's log."""

    left: float = MAX_LOG_BYTES
    counted_at: float = field(default_factory=time.monotonic)
    has_warned: bool = False

    def cut(self, chunk: bytes) -> bytes:
        """The lines of it that may be written."""
        now = time.monotonic()
        self.left = min(MAX_LOG_BYTES, self.left + (now - self.counted_at) * LOG_BYTES_PER_S)
        self.counted_at = now
        is_whole = len(chunk) <= self.left
        kept = chunk if is_whole else chunk[: chunk.rfind(b"\n", 0, int(self.left)) + 1]
        self.left -= len(kept)
        if len(kept) == len(chunk):
            self.has_warned = False
        elif not self.has_warned:
            self.has_warned = True
            kept += b"\n[the reward prints too much; the rest of its output is not logged]\n"
        return kept


@dataclass(slots=True)
class WorkerProcess:
    """At most one running process; `kill()` also ends its descendants. Raises SandboxError where no
    sandbox can be had, which is never the fault of the reward."""

    _function: str
    _isolation: Isolation = field(default_factory=Isolation)
    _box: Sandbox | None = None
    _process: SandboxProcess | None = None
    _logging: asyncio.Task[None] | None = None
    _log_budget: LogBudget = field(default_factory=LogBudget)

    async def start(self) -> None:
        """Start the worker and wait until it has imported the function; raises RewardError if it
        cannot."""
        self._box = await self._isolation.open(
            Use.REWARD,
            folders=(*python_folders(), *module_files(self._function)),
            env={"PYTHONPATH": os.pathsep.join(sys.path)},  # it imports whatever the node can
        )
        argv = [sys.executable, "-m", "penstock.rollout.rewards.worker", self._function]
        try:
            await self._box.start()
            self._process = await self._box.exec(argv)
            self._logging = asyncio.create_task(
                _copy_to_log(self._process.stderr, self._log_budget)
            )
            async with asyncio.timeout(START_S):
                ready = await self._read()
        except BaseException:
            await self.kill()
            raise
        if ready.error:
            await self.kill()
            raise RewardError(f"reward {self._function}: {ready.error}")

    async def score(self, request: ScoreRequest, deadline_s: float) -> ScoreAnswer:
        """Score one batch. After TimeoutError or RewardError the process is dead; the next call
        starts a new one."""
        if self._process is None:
            await self.start()
        assert self._process is not None
        try:
            async with asyncio.timeout(deadline_s):
                self._process.stdin.write(pack(request))
                await self._process.stdin.drain()
                return await self._read()
        except ConnectionError as error:  # it died between two batches
            await self.kill()
            raise RewardError(f"reward {self._function}: worker process died: {error}") from None
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        box, self._box, self._process = self._box, None, None
        try:
            if box is not None:
                await box.kill()
        finally:
            if self._logging is not None:
                await self._logging  # ends with the pipe
                self._logging = None

    async def _read(self) -> ScoreAnswer:
        assert self._process is not None
        try:
            num_bytes = frame_bytes(await self._process.stdout.readexactly(PREFIX_BYTES))
            if num_bytes > MAX_ANSWER_BYTES:
                raise RewardError(f"reward {self._function} corrupted its worker's pipe")
            return ANSWERS.decode(await self._process.stdout.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            ended = await self._process.wait()
            how = f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
            if ended.limit:
                how = f"its limit {ended.limit}; see sandbox.reward.limits in the run file"
            raise RewardError(
                f"reward {self._function}: worker process exited unexpectedly ({how})"
            ) from None
        except msgspec.MsgspecError:
            raise RewardError(f"reward {self._function} corrupted its worker's pipe") from None


async def _copy_to_log(source: ReadStream, budget: LogBudget) -> None:
    """consumes: what the function prints · produces: the same in the node's log, within a budget
    waits for: its output, until the end of the process"""
    held = b""
    while chunk := await source.read(_MAX_LINE_BYTES):
        lines, _, held = (held + chunk).rpartition(b"\n")
        if len(held) > _MAX_LINE_BYTES:
            lines, held = lines + b"\n" + held, b""
        _write_to_log(lines + b"\n" if lines else b"", budget)
    _write_to_log(held, budget)


def _write_to_log(lines: bytes, budget: LogBudget) -> None:
    """Whole lines, or a secret could be cut in two."""
    if lines and (kept := budget.cut(lines)):
        text = hide_secrets(kept.decode(errors="replace"))
        sys.stderr.buffer.write(text.encode(errors="replace"))
        sys.stderr.flush()
