# SPDX-License-Identifier: Apache-2.0
"""A back end for hosts with podman or docker: each program in a container without network.

Uses the command line of either, and an image that has `/bin/sh`. Files lie in a folder of this
host, so the engine must run here too. As root, that folder is a file system of the size of the disk
limit; else the limit holds per file. The engine builds the walls, without a user namespace where
docker runs as root, and the control group of each program, whose processor time is watched.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SandboxError
from penstock.rollout.sandbox.cgroups import Group, group_of
from penstock.rollout.sandbox.child import Child, start_child
from penstock.rollout.sandbox.folders import FolderSandbox, remove_stale_folders
from penstock.rollout.sandbox.mounts import disk_options, hidden_within
from penstock.rollout.sandbox.namespaces import draw_uid
from penstock.rollout.sandbox.owners import new_name
from penstock.rollout.sandbox.program import Program
from penstock.rollout.sandbox.seccomp import build_profile
from penstock.rollout.sandbox.types import WORK_DIR, Level, SandboxSpec
from penstock.rollout.sandbox.walls import (
    HOST_PATH,
    INNER_ENV,
    MAX_OPEN_FILES,
    START_S,
    command_line,
    end_child,
    expect_ready,
    launcher,
)

_PROFILE = "seccomp.json"
"""In the folder of a sandbox, where its programs see nothing."""
_FIX = "pull an image that has /bin/sh, and name it in the section `sandbox` of the run file"


def find_engine() -> str:
    """`podman` or `docker`, whichever answers; empty if none does."""
    for engine in filter(shutil.which, ("podman", "docker")):
        done = subprocess.run([engine, "info"], capture_output=True, check=False, timeout=START_S)
        if done.returncode == 0:
            return engine
    return ""


@dataclass(slots=True)
class ContainerBackend:
    image: str
    engine: str = field(default_factory=find_engine)
    name: str = "container"
    level: Level = Level.NAMESPACES

    def __post_init__(self) -> None:
        remove_stale_folders()

    def create(self, spec: SandboxSpec) -> ContainerSandbox:
        if not self.engine:
            raise SandboxError(
                "neither podman nor docker answers on this host; install and start one, or choose "
                "the back end bubblewrap"
            )
        uid = draw_uid()
        return ContainerSandbox(spec=spec, owner=uid, engine=self.engine, image=self.image)


@dataclass(slots=True, kw_only=True)
class ContainerSandbox(FolderSandbox):
    engine: str
    image: str
    _more_folders: tuple[str, ...] = ("tmp", "shm")

    async def exec(self, argv: Sequence[str], *, env: Mapping[str, str] = {}) -> Program:
        line = command_line(argv, {**INNER_ENV, **self.spec.env, **env})
        name = new_name()
        command = [self.engine, "run", "--rm", "--interactive", "--name", name, *self._walls()]
        command += [self.image, *launcher(self.spec.limits, has_memory_group=True)]
        child = await start_child(command, env={"PATH": HOST_PATH})
        try:
            async with asyncio.timeout(START_S):
                await expect_ready(child, f"{self.engine} does not start {self.image}", _FIX)
                group = await asyncio.to_thread(self._group_of, name)
        except BaseException:
            self._kill_container(name)
            await end_child(child)
            raise
        child.stdin.write(line)
        program = Program(
            _child=child,
            _limits=self.spec.limits,
            _group=group,
            _kill=lambda: self._end_program(name, child),
            _wait_gone=_already_gone,
        )
        self._programs.append(program)
        return program

    def _walls(self) -> list[str]:
        limits, user = self.spec.limits, self.owner if self.owner >= 0 else 1000
        words = ["--network=none", "--read-only", "--cap-drop=ALL", f"--user={user}:{user}"]
        words.append("--stop-timeout=0")  # programs that are ended get no time to object
        words += ["--security-opt=no-new-privileges", f"--memory={limits.memory_mb}m"]
        if build_profile():
            words.append(f"--security-opt=seccomp={self.path / _PROFILE}")
        words += [f"--pids-limit={limits.num_processes + 2}", f"--workdir={WORK_DIR}"]
        # The defaults of engines may be beyond what this process may ask for.
        most = {"nofile": MAX_OPEN_FILES, "nproc": limits.num_processes + 2}
        words += [f"--ulimit={name}={number}:{number}" for name, number in most.items()]
        words += [f"--volume={self.path}/{inside}" for inside in ("work:/work", "tmp:/tmp")]
        words.append(f"--volume={self.path}/shm:/dev/shm")
        if Path(self.engine).name == "podman":  # which adds file systems without a limit
            words.append("--read-only-tmpfs=false")
        words.append(f"--volume={self.path}/secrets:/run/secrets:ro")
        for name, socket in self.spec.grants.sockets.items():  # a link would lead nowhere inside
            words.append(f"--volume={socket}:/run/sockets/{name}:ro")
        for folder in self.spec.grants.folders:
            words.append(f"--volume={folder}:{folder}:ro")
            for hidden in hidden_within(self.spec.grants, folder.resolve()):
                words.append(f"--tmpfs={folder / hidden}:ro,size=4k,mode=0555")
        return words

    def _make_root(self) -> None:
        self.path.mkdir()
        if os.geteuid() == 0:
            options = disk_options(self.spec.limits.disk_mb)
            command = ["mount", "-t", "tmpfs", "-o", options, "penstock", str(self.path)]
            done = subprocess.run(command, check=False, capture_output=True, timeout=START_S)
            if done.returncode:  # without it there is no limit of its disk
                why = done.stderr.decode(errors="replace").strip()
                raise OSError(errno.EIO, f"no separate file system: {why}")
        if profile := build_profile():
            (self.path / _PROFILE).write_text(json.dumps(profile))

    def _group_of(self, name: str) -> Group:
        """The control group that the engine made for this container. Raises SandboxError: without
        it the processor time of the program would not be watched."""
        command = [self.engine, "inspect", "--format", "{{.State.Pid}}", name]
        done = subprocess.run(command, check=False, capture_output=True, timeout=START_S)
        pid = done.stdout.strip()
        if done.returncode or not pid.isdigit():
            why = done.stderr.decode(errors="replace").strip()
            raise SandboxError(f"{self.engine} does not say which process its container is: {why}")
        return group_of(int(pid))

    def _end_program(self, name: str, child: Child) -> None:
        """Ends the engine's own process too: it would hang as it writes output that is not read."""
        self._kill_container(name)
        child.send(signal.SIGKILL)

    def _kill_container(self, name: str) -> None:
        command = [self.engine, "rm", "--force", name]
        subprocess.run(command, check=False, capture_output=True, timeout=START_S)


async def _already_gone() -> None:
    """The engine removes a container only after its last process."""
