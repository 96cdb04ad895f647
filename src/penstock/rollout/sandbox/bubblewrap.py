# SPDX-License-Identifier: Apache-2.0
"""The default back end: namespaces by bubblewrap, a seccomp filter, limits and control groups.

Each program gets fresh namespaces of processes, network, users and the rest. As root, each sandbox
has its own user id: bubblewrap never runs as root, where its programs would keep rights.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from penstock.rollout.sandbox.cgroups import Parents, find_parents
from penstock.rollout.sandbox.mounts import PLACES, ROOT
from penstock.rollout.sandbox.namespaces import NamespaceSandbox
from penstock.rollout.sandbox.seccomp import build_filter
from penstock.rollout.sandbox.types import WORK_DIR, Level, SandboxSpec
from penstock.rollout.sandbox.walls import Walls, join_command, launcher

_ETC = ("alternatives", "ld.so.cache", "ssl", "localtime", "nsswitch.conf", "mime.types")


@dataclass(slots=True)
class BubblewrapBackend:
    program: str = "bwrap"
    parents: Parents = field(default_factory=find_parents)
    name: str = "bubblewrap"
    level: Level = Level.NAMESPACES

    def __post_init__(self) -> None:
        self.parents.reap()

    def create(self, spec: SandboxSpec) -> BubblewrapSandbox:
        return BubblewrapSandbox(spec=spec, program=self.program, parents=self.parents)


@dataclass(slots=True, kw_only=True)
class BubblewrapSandbox(NamespaceSandbox):
    program: str

    async def _open_walls(self) -> Walls:
        filter_fd = os.memfd_create("seccomp")
        try:
            os.write(filter_fd, build_filter())
            os.lseek(filter_fd, 0, os.SEEK_SET)
            argv = [*self._mounts.enter, *join_command(self._group.joins), *self._become_user()]
            argv += [self.program, "--seccomp", str(filter_fd), *self._walls(), "--"]
            argv += launcher(self.spec.limits, has_memory_group=self.parents.has_memory)
            return await Walls.open(argv, "bubblewrap", pass_fds=(filter_fd,))
        finally:
            os.close(filter_fd)

    def _become_user(self) -> list[str]:
        uid = self._mounts.owner
        if uid < 0:
            return []
        user = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        return ["setpriv", *user, "--inh-caps=-all", "--bounding-set=-all", "--"]

    def _walls(self) -> list[str]:
        path = self._mounts.path
        return [
            *("--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"),
            *("--uid", "1000", "--gid", "1000", "--hostname", "sandbox"),
            *("--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"),
            *(_system_folders() if self.spec.root is None else self._root_folders(self.spec.root)),
            *("--ro-bind", f"{path}/etc/passwd", "/etc/passwd"),
            *("--ro-bind", f"{path}/etc/group", "/etc/group"),
            *("--ro-bind", f"{path}/etc/hosts", "/etc/hosts"),
            *("--ro-bind", f"{path}/secrets", "/run/secrets"),
            *("--ro-bind", f"{path}/sockets", "/run/sockets"),
            *("--proc", "/proc", "--dev", "/dev", "--bind", f"{path}/shm", "/dev/shm"),
            *("--bind", f"{path}/tmp", "/tmp", "--bind", f"{path}/work", WORK_DIR),
            *self._places(),
            *self._granted_folders(),
            *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", WORK_DIR),
        ]

    def _places(self) -> list[str]:
        """Not below `work`: a program could put a link in the place of a folder there, and the
        next program's mount would follow it."""
        source = f"{self._mounts.path}/{PLACES}"
        names = self.spec.writable
        return [word for name in names for word in ("--bind", f"{source}/{name}", f"/{name}")]

    def _root_folders(self, root: Path) -> list[str]:
        """A root file system, folder by folder, without what the sandbox has itself."""
        own = {"proc", "sys", "dev", "run", "tmp", "etc", WORK_DIR[1:], *self.spec.writable}
        shown = f"{self._mounts.path}/{ROOT}"
        words = _entries(root, shown, "", own)
        if (root / "etc").is_dir():
            words += _entries(root / "etc", f"{shown}/etc", "/etc", {"passwd", "group", "hosts"})
        return words

    def _granted_folders(self) -> list[str]:
        return [
            word
            for place, source in self._mounts.granted_folders.items()
            for word in ("--ro-bind", source, place)
        ]


def _entries(folder: Path, shown: str, place: str, left_out: set[str]) -> list[str]:
    """Binds what is in a folder, read-only; links stay links."""
    words = list[str]()
    for path in sorted(folder.iterdir()):
        if path.name in left_out:
            continue
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), f"{place}/{path.name}"]
        elif path.is_dir() or path.is_file():
            words += ["--ro-bind", f"{shown}/{path.name}", f"{place}/{path.name}"]
    return words


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
