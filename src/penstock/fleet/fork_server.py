# SPDX-License-Identifier: Apache-2.0
"""Starts services by forking a process that has imported their libraries already.

Importing takes a service seconds, torch and transformers most of them: one process
(`penstock.cli.fork_server`) imports for all, and its memory is shared. Owns the launcher's end of
its pipe. A service that it cannot start (another environment, a password, a server that ended) is
left to an ordinary start. A forked service is a child of the launcher like any other: the server
forks twice, and the kernel gives orphans to the nearest process that asks for them.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.config.store_password import PASSWORD_ENV
from penstock.fleet.processes import PARENT_PID_ENV, Child, ForkedChild
from penstock.fleet.service_tokens import TOKEN_FILE_ENV

COMMAND = (sys.executable, "-m", "penstock.cli.fork_server")
START_TIMEOUT_S = 120.0
"""Most seconds for the imports of a service, on a busy machine too."""
EXIT_TIMEOUT_S = 10.0
IDLE_S = 1.0
"""Without a fork for this time the first server ends: the services of a run have started, and have
copies of what they write to. A server that a restart needed stays: there may be more restarts."""
_OWN_ENVS = (TOKEN_FILE_ENV, PARENT_PID_ENV)
"""What each service has for itself and reads after its imports. Libraries read other variables
while they are imported, so a service that differs in one is not forked."""
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class ForkServer:
    def __init__(self, log: Path) -> None:
        """log: what the server itself prints."""
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._is_first = True
        self._used_at = 0.0
        self._env: Mapping[str, str] = {}
        self._cwd: Path | None = None

    def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None,
        log: Path,
        preload: Sequence[str],
    ) -> Child | None:
        """Fork a process that runs `penstock WORDS`, in a new session and process group; its
        output is appended to `log`. None if it must be started in the ordinary way.

        preload: modules to import before."""
        if PASSWORD_ENV in env:
            return None  # services forked later, which run code of others, would find it in memory
        with log.open("ab"):  # raises here what the child could not report
            pass
        if self._process is None:
            self._run(env, cwd)
        elif _shared(env) != self._env or cwd != self._cwd:
            return None
        env = {**env, PARENT_PID_ENV: str(os.getpid())}
        request = {"words": words, "env": env, "log": str(log.absolute()), "preload": preload}
        with _adopting_orphans():
            pid = self._ask(json.dumps(request).encode() + b"\n")
        self._used_at = time.monotonic()
        return None if pid is None else ForkedChild(pid)

    def free_memory(self) -> None:
        """End a server that is idle; the next start makes another."""
        if self._is_first and time.monotonic() - self._used_at > IDLE_S:
            self.close()

    def close(self) -> None:
        """End the server; what it started goes on."""
        if self._process is None:
            return
        self._is_first = False
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(timeout=EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:  # in the middle of imports, or suspended
            self._process.kill()
            self._process.wait(timeout=EXIT_TIMEOUT_S)
        self._process = None

    def _run(self, env: Mapping[str, str], cwd: Path | None) -> None:
        self._env, self._cwd = _shared(env), cwd
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                COMMAND,
                env={**self._env, PARENT_PID_ENV: str(os.getpid())},
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                start_new_session=True,
            )

    def _ask(self, request: bytes) -> int | None:
        """The pid of the child; None if the server is gone, or does not answer."""
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is not None:
            return None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
            answers = self._process.stdout.fileno()
            if select.select([answers], [], [], START_TIMEOUT_S)[0]:
                answer = os.read(answers, 64).strip()  # one line, written at once
                return int(answer) if answer.isdigit() else None
        except BrokenPipeError:
            return None
        self._process.kill()  # its next answer would be taken for that to another request
        return None


def _shared(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in _OWN_ENVS}


@contextmanager
def _adopting_orphans() -> Generator[None]:
    """Meanwhile orphans below this process become its children."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int(0)
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)
