# SPDX-License-Identifier: Apache-2.0
"""The default back end: namespaces by bubblewrap, a seccomp filter, limits and control groups.

A sandbox is one file system (`mounts`) and one control group. Each program gets fresh namespaces of
processes, network, users and the rest, and ends with all its descendants. As root, each sandbox has
a user id of its own. Bubblewrap starts ahead of the program: inside, a shell sets the limits and
waits for the command on its standard input; so a pooled sandbox needs only to be told what to run.
The shell is the first process inside: when it ends, the kernel ends all others.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SandboxError
from penstock.rollout.sandbox.cgroups import Group, Parents, find_parents
from penstock.rollout.sandbox.child import Child, start_child
from penstock.rollout.sandbox.files import WorkFolder
from penstock.rollout.sandbox.mounts import HOST_PATH, START_S, Mounts
from penstock.rollout.sandbox.program import Program
from penstock.rollout.sandbox.seccomp import build_filter
from penstock.rollout.sandbox.types import WORK_DIR, Level, Limits, SandboxSpec

INNER_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": WORK_DIR, "LANG": "C.UTF-8"}
FIRST_UID, NUM_UIDS = 1 << 30, 1 << 29
"""User ids of sandboxes: drawn, so that nodes of one host need not agree on them."""
_MAX_OPEN_FILES = 1024
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_JOIN = 'for file in $0; do echo 0 > "$file" || exit 125; done; exec "$@"'
_ETC = ("alternatives", "ld.so.cache", "ssl", "localtime", "nsswitch.conf", "mime.types")


@dataclass(slots=True)
class BubblewrapBackend:
    program: str = "bwrap"
    parents: Parents = field(default_factory=find_parents)
    name: str = "bubblewrap"
    level: Level = Level.NAMESPACES

    def __post_init__(self) -> None:
        self.parents.reap()

    async def self_test(self) -> str:
        from penstock.rollout.sandbox.probe import probe  # it uses back ends

        return await probe(self)

    def create(self, spec: SandboxSpec) -> BubblewrapSandbox:
        return BubblewrapSandbox(spec=spec, program=self.program, parents=self.parents)


@dataclass(slots=True, kw_only=True)
class BubblewrapSandbox:
    spec: SandboxSpec
    program: str
    parents: Parents
    _mounts: Mounts = field(init=False)
    _group: Group = field(default_factory=Group)
    _waiting: _Walls | None = None
    _programs: list[Program] = field(default_factory=list[Program])

    def __post_init__(self) -> None:
        uid = FIRST_UID + secrets.randbelow(NUM_UIDS) if os.geteuid() == 0 else -1
        self._mounts = Mounts(spec=self.spec, owner=uid)

    async def start(self) -> None:
        try:
            self._group = self.parents.create(self.spec.limits)
            await self._mounts.open()
            self._waiting = await self._open_walls()
        except BaseException as error:
            await self.kill()
            if isinstance(error, OSError | TimeoutError):
                raise SandboxError(f"cannot start a sandbox: {error}") from error
            raise

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] = {}) -> Program:
        walls, self._waiting = self._waiting or await self._open_walls(), None
        program = Program(
            _child=walls.child,
            _limits=self.spec.limits,
            _group=self._group,
            _kill=walls.kill,
            _wait_gone=walls.wait_gone,
        )
        self._programs.append(program)
        line = command_line(argv, {**INNER_ENV, **self.spec.env, **env})
        walls.child.stdin.write(line)
        return program

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await asyncio.to_thread(self._folder.put, path, data, mode)

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await asyncio.to_thread(self._folder.get, path, max_bytes)

    async def snapshot(self) -> bytes:
        return await asyncio.to_thread(self._folder.snapshot, self.spec.limits.disk_mb << 20)

    async def kill(self) -> None:
        walls, self._waiting = self._waiting, None
        if walls is not None:
            await walls.close()
        programs, self._programs = self._programs, []
        await asyncio.gather(*(program.kill() for program in programs))
        await self._mounts.close()
        await asyncio.to_thread(self._group.remove)

    @property
    def _folder(self) -> WorkFolder:
        return WorkFolder(fd=self._mounts.folder_fd, owner=self._mounts.owner)

    async def _open_walls(self) -> _Walls:
        info, info_write = os.pipe()
        filter_fd = os.memfd_create("seccomp")
        try:
            os.write(filter_fd, build_filter())
            os.lseek(filter_fd, 0, os.SEEK_SET)
            argv = [*self._mounts.enter, *self._outer_command(), self.program]
            argv += ["--seccomp", str(filter_fd), "--info-fd", str(info_write)]
            argv += [*self._walls(), "--", "/bin/sh", "-c", self._launcher()]
            fds = (filter_fd, info_write)
            child = await start_child(argv, env={"PATH": HOST_PATH}, pass_fds=fds)
            os.close(info_write)
            info_write = -1
            return await _Walls.await_ready(child, info)
        finally:
            for fd in (info, info_write, filter_fd):
                if fd >= 0:
                    os.close(fd)

    def _outer_command(self) -> list[str]:
        """Enter the control group, then become the sandbox's own user."""
        command = ["sh", "-c", _JOIN, " ".join(self._group.joins)] if self._group.joins else []
        uid = self._mounts.owner
        if uid >= 0:
            command += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
            command += ["--inh-caps=-all", "--bounding-set=-all", "--"]
        return command

    def _walls(self) -> list[str]:
        path = self._mounts.path
        return [
            *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
            *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
            *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"),
            *_system_folders(),
            *("--ro-bind", f"{path}/etc/passwd", "/etc/passwd"),
            *("--ro-bind", f"{path}/etc/group", "/etc/group"),
            *("--ro-bind", f"{path}/etc/hosts", "/etc/hosts"),
            *("--ro-bind", f"{path}/secrets", "/run/secrets"),
            *("--ro-bind", f"{path}/sockets", "/run/sockets"),
            *self._granted_folders(),
            *("--proc", "/proc", "--dev", "/dev", "--bind", f"{path}/shm", "/dev/shm"),
            *("--bind", f"{path}/tmp", "/tmp", "--bind", f"{path}/work", WORK_DIR),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK_DIR),
        ]

    def _granted_folders(self) -> list[str]:
        return [
            word
            for number, folder in enumerate(self.spec.grants.folders)
            for word in ("--ro-bind", f"{self._mounts.path}/folders/{number}", str(folder))
        ]

    def _launcher(self) -> str:
        limits = limit_commands(self.spec.limits, has_memory_group=self.parents.has_memory)
        return f'{limits} && echo ready && IFS= read -r line && (eval "$line"); exit $?'


@dataclass(slots=True, kw_only=True)
class _Walls:
    """Bubblewrap, with a shell inside that waits for a command."""

    child: Child
    init_fd: int
    """A descriptor of the first process inside: with it ends every process inside."""

    @classmethod
    async def await_ready(cls, child: Child, info: int) -> _Walls:
        try:
            async with asyncio.timeout(START_S):
                if await child.stdout.readline() != b"ready\n":
                    why = (await child.stderr.read(2000)).decode(errors="replace").strip()
                    raise SandboxError(
                        f"bubblewrap does not start: {why or 'no message'}; allow user namespaces "
                        "on this host, or choose another back end"
                    )
            pid = json.loads(os.read(info, 4096))["child-pid"]
            return cls(child=child, init_fd=os.pidfd_open(pid))
        except BaseException:
            child.send(signal.SIGKILL)
            await child.wait_ended()
            child.close()
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


def _system_folders() -> list[str]:
    """Programs and libraries of the host, read-only, and the few files of /etc that they need."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            words += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        words += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return words


def limit_commands(limits: Limits, *, has_memory_group: bool) -> str:
    """The shell commands that limit the program that follows."""
    cpu_s, blocks = max(1, round(limits.cpu_s)), limits.disk_mb * 2048
    processes = limits.num_processes + 1
    commands = [
        "ulimit -c 0",
        f"ulimit -n {_MAX_OPEN_FILES}",
        f"ulimit -f {blocks}",
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
            raise ValueError(f"{name!r} cannot name an environment variable")
    words = [*argv, *env.values()]
    if not argv or any("\0" in word for word in words):
        raise ValueError("a command is at least one word, and no word contains a NUL")
    exports = "".join(f"export {name}={_quote(value)}; " for name, value in env.items())
    line = f"{exports}exec {' '.join(map(_quote, argv))}\n"
    if any("\n" in word for word in words):
        line = f"nl=$(printf '\\n.'); nl=${{nl%.}}; {line}"
    return os.fsencode(line)


def _quote(word: str) -> str:
    return '"$nl"'.join(shlex.quote(part) for part in word.split("\n"))
