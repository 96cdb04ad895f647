# SPDX-License-Identifier: Apache-2.0
"""The node's handle on one reward worker: start, score, kill. Owns the process; knows nothing of
batching."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import Process
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from penstock.errors import RewardError
from penstock.rollout.programs import inherited_env
from penstock.rollout.rewards.frames import (
    ANSWERS,
    MAX_FRAME_BYTES,
    PREFIX_BYTES,
    ScoreAnswer,
    ScoreRequest,
    frame_bytes,
    pack,
)

START_S = 120.0
"""How long the user's module may take to import; some load a computer algebra system."""


@dataclass(slots=True)
class WorkerProcess:
    """At most one running process; `kill()` also kills its process group."""

    _function: str
    _process: Process | None = None

    async def start(self) -> None:
        """Start the worker and wait until it has imported the function; raises RewardError if it
        cannot."""
        # The worker can import whatever the node can.
        env = {**inherited_env(), "PYTHONPATH": os.pathsep.join(sys.path)}
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock.rollout.rewards.worker"),
            *(self._function, str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=env,
        )
        try:
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
        assert self._process is not None and self._process.stdin is not None
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
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    async def _read(self) -> ScoreAnswer:
        assert self._process is not None and self._process.stdout is not None
        try:
            num_bytes = frame_bytes(await self._process.stdout.readexactly(PREFIX_BYTES))
            if num_bytes > MAX_FRAME_BYTES:
                raise RewardError(f"reward {self._function} corrupted its worker's pipe")
            return ANSWERS.decode(await self._process.stdout.readexactly(num_bytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await self._process.wait()
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            raise RewardError(
                f"reward {self._function}: worker process exited unexpectedly ({how})"
            ) from None
        except msgspec.MsgspecError:
            raise RewardError(f"reward {self._function} corrupted its worker's pipe") from None
