# SPDX-License-Identifier: Apache-2.0
"""A process namespace with a shell inside that waits for a command on its standard input.

Owns the shell's first line, the command as one line of shell, and the end: killing the first
process inside ends all of them, and `wait_gone` returns when the kernel has done so.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import SandboxError
from penstock.rollout.sandbox.child import Child, start_child
from penstock.rollout.sandbox.types import WORK_DIR, CommandRefused, Limits

START_S = 60.0
HOST_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INNER_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": WORK_DIR,
    "LANG": "C.UTF-8",
    "PENSTOCK_SECRETS": "/run/secrets",
    "PENSTOCK_SOCKETS": "/run/sockets",
}
NO_NAMESPACES = "allow user namespaces on this host, or choose another back end"
MAX_OPEN_FILES = 1024
_MAX_LINE_BYTES = 2 << 20
"""Of a command and its environment; the kernel takes no more."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_JOIN = 'for file in $0; do echo 0 > "$file" || exit 125; done; exec "$@"'


@dataclass(slots=True, kw_only=True)
class Walls:
    child: Child
    """The process outside, which ends with the first one inside."""
    init_fd: int
    """A descriptor of the first process inside."""

    @classmethod
    async def open(cls, argv: Sequence[str], what: str, pass_fds: Sequence[int] = ()) -> Walls:
        """Start a command that runs `launcher(…)` inside, and wait until it is ready."""
        child = await start_child(argv, env={"PATH": HOST_PATH}, pass_fds=pass_fds)
        try:
            async with asyncio.timeout(START_S):
                await expect_ready(child, f"{what} does not start", NO_NAMESPACES)
            return cls(child=child, init_fd=os.pidfd_open(_only_child(child.pid)))
        except BaseException:
            await end_child(child)
            raise

    def kill(self) -> None:
        if self.init_fd >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.init_fd, signal.SIGKILL)

    async def wait_gone(self) -> None:
        if self.init_fd >= 0:
            gone, loop = asyncio.Event(), asyncio.get_running_loop()
            loop.add_reader(self.init_fd, gone.set)
            await gone.wait()
            loop.remove_reader(self.init_fd)
            os.close(self.init_fd)
            self.init_fd = -1

    async def close(self) -> None:
        self.kill()
        await self.child.wait_ended()
        await self.wait_gone()
        self.child.close()


def _only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


async def expect_ready(child: Child, what: str, fix: str) -> None:
    if await child.stdout.readline() != b"ready\n":
        why = (await child.stderr.read(2000)).decode(errors="replace").strip()
        raise SandboxError(f"{what}: {why or 'it ended without a message'}; {fix}")


async def end_child(child: Child) -> None:
    child.send(signal.SIGKILL)
    try:
        await child.wait_ended()
    finally:
        child.close()


def join_command(joins: Sequence[str]) -> list[str]:
    """Enters control groups, then runs the command that follows."""
    return ["sh", "-c", _JOIN, " ".join(joins)] if joins else []


def launcher(limits: Limits, *, has_memory_group: bool) -> list[str]:
    """The shell: it limits itself, says that it is ready, and becomes the parent of the program."""
    ulimits = limit_commands(limits, has_memory_group=has_memory_group)
    script = f'{ulimits} && echo ready && IFS= read -r line && (eval "$line"); exit $?'
    return ["/bin/sh", "-c", script]


def limit_commands(limits: Limits, *, has_memory_group: bool) -> str:
    """The shell commands that limit the program that follows."""
    cpu_s, processes = max(1, round(limits.cpu_s)), limits.num_processes + 1
    commands = [
        "ulimit -c 0",
        f"ulimit -n {MAX_OPEN_FILES}",
        f"ulimit -f {limits.disk_mb * 2048}",
        f"ulimit -S -t {cpu_s}",
        f"ulimit -H -t {cpu_s + 1}",
        f"{{ ulimit -p {processes} 2>/dev/null || ulimit -u {processes}; }}",
    ]
    if not has_memory_group:
        commands.append(f"ulimit -v {limits.memory_mb * 1024}")
    return " && ".join(commands)


def command_line(argv: Sequence[str], env: Mapping[str, str]) -> bytes:
    """One line of shell that becomes the program; nothing in it is expanded."""
    for name in env:
        if not _ENV_NAME.fullmatch(name):
            raise CommandRefused(f"{name[:80]!r} cannot name an environment variable")
    words = [*argv, *env.values()]
    if not argv or any("\0" in word for word in words):
        raise CommandRefused("a command is at least one word, and no word contains a NUL")
    if sum(map(len, words)) > _MAX_LINE_BYTES:
        raise CommandRefused(f"a command has at most {_MAX_LINE_BYTES} bytes; use files")
    exports = "".join(f"export {name}={_quote(value)}; " for name, value in env.items())
    line = f"{exports}exec {' '.join(map(_quote, argv))}\n"
    if any("\n" in word for word in words):
        line = f"nl=$(printf '\\n.'); nl=${{nl%.}}; {line}"
    try:
        return os.fsencode(line)
    except UnicodeEncodeError:
        raise CommandRefused("a word of the command is not Unicode text") from None


def _quote(word: str) -> str:
    return '"$nl"'.join(shlex.quote(part) for part in word.split("\n"))
