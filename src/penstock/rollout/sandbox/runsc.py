# SPDX-License-Identifier: Apache-2.0
"""The strong back end: gVisor's `runsc`, a kernel of its own around each program. Needs root.

Programs see the same files as under bubblewrap, and can connect to granted sockets. The platform is
ptrace, which every host offers: system calls are slow. Memory and processes are limited by control
groups only, which also count gVisor's own.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import SandboxError
from penstock.rollout.sandbox.cgroups import Parents, find_parents
from penstock.rollout.sandbox.mounts import write_file
from penstock.rollout.sandbox.namespaces import NamespaceSandbox
from penstock.rollout.sandbox.owners import new_name
from penstock.rollout.sandbox.types import WORK_DIR, Level, SandboxSpec
from penstock.rollout.sandbox.walls import INNER_ENV, Walls, join_command, launcher

_OWN_PROCESSES = 300
"""Threads of gVisor itself."""
_ETC = ("alternatives", "ld.so.cache", "ssl", "localtime", "nsswitch.conf", "mime.types")
_FLAGS = ("--platform=ptrace", "--network=none", "--ignore-cgroups", "--host-uds=open")


@dataclass(slots=True)
class RunscBackend:
    program: str = "runsc"
    parents: Parents = field(default_factory=find_parents)
    name: str = "runsc"
    level: Level = Level.GVISOR

    def __post_init__(self) -> None:
        self.parents.reap()

    def create(self, spec: SandboxSpec) -> RunscSandbox:
        return RunscSandbox(
            spec=spec, program=self.program, parents=self.parents, own_processes=_OWN_PROCESSES
        )


@dataclass(slots=True, kw_only=True)
class RunscSandbox(NamespaceSandbox):
    program: str

    def __post_init__(self) -> None:
        NamespaceSandbox.__post_init__(self)
        self._mounts.has_state = True

    async def _open_walls(self) -> Walls:
        if os.geteuid() != 0:
            raise SandboxError("runsc needs root; choose the back end bubblewrap, or run as root")
        name = new_name()
        bundle = self._mounts.make_folder(name)
        try:
            os.mkdir("root", dir_fd=bundle)
            write_file(bundle, "config.json", json.dumps(self._config()).encode(), 0o600, -1)
        finally:
            os.close(bundle)
        path = f"{self._mounts.path}/state/{name}"
        argv = [*self._mounts.enter, *join_command(self._group.joins)]
        argv += ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--"]
        argv += [self.program, *_FLAGS, f"--root={path}/state", "run", f"--bundle={path}", name]
        return await Walls.open(argv, "runsc")

    def _config(self) -> dict[str, Any]:
        """What to run, as an OCI bundle says it."""
        uid = self._mounts.owner
        args = launcher(self.spec.limits, has_memory_group=True)
        env = [f"PATH={INNER_ENV['PATH']}"]
        user = {"uid": uid, "gid": uid}
        namespaces = ("pid", "network", "ipc", "uts", "mount")
        return {
            "ociVersion": "1.0.2",
            "hostname": "sandbox",
            "root": {"path": "root", "readonly": True},
            "process": {
                "user": user,
                "args": args,
                "env": env,
                "cwd": WORK_DIR,
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "mounts": self._oci_mounts(),
            "linux": {"namespaces": [{"type": kind} for kind in namespaces]},
        }

    def _oci_mounts(self) -> list[dict[str, Any]]:
        path = self._mounts.path
        seen = {
            "/usr": "/usr",
            "/run/secrets": f"{path}/secrets",
            "/run/sockets": f"{path}/sockets",
        }
        seen |= {f"/{name}": f"/{name}" for name in ("bin", "sbin", "lib", "lib32", "lib64")}
        seen |= {f"/etc/{name}": f"/etc/{name}" for name in _ETC}
        seen |= {f"/etc/{name}": f"{path}/etc/{name}" for name in ("passwd", "group", "hosts")}
        owned = {"/tmp": f"{path}/tmp", "/dev/shm": f"{path}/shm", WORK_DIR: f"{path}/work"}
        visible = {at: source for at, source in seen.items() if _exists(source, path)}
        return [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            *(_bind(source, at, "ro") for at, source in visible.items()),
            *(_bind(source, at, "rw") for at, source in owned.items()),
            *(_bind(source, at, "ro") for at, source in self._mounts.granted_folders.items()),
        ]


def _exists(source: str, own: str) -> bool:
    return source.startswith(own) or Path(source).exists()


def _bind(source: str, at: str, mode: str) -> dict[str, Any]:
    options = ["rbind", mode, "nosuid", "nodev"]
    return {"destination": at, "type": "bind", "source": source, "options": options}
