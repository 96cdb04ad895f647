# SPDX-License-Identifier: Apache-2.0
"""Control groups of sandboxes: limits of memory and processes that hold for all programs together.

Works with cgroup v1, v2 or neither. Owns the names of groups: they carry the process that made
them, so that a later node removes the groups of a killed one. Never touches a group of others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SandboxError
from penstock.rollout.sandbox.owners import PREFIX, is_stale, new_name
from penstock.rollout.sandbox.types import Limits

_REMOVE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parents:
    """The folders in which groups can be made, by controller: `memory`, `pids`, `cpuacct` (v1), or
    `unified` (v2, all in one). Empty: no control groups here."""

    folders: dict[str, Path] = field(default_factory=dict[str, Path])

    @property
    def has_memory(self) -> bool:
        return bool(self.folders.keys() & {"memory", "unified"})

    def create(self, limits: Limits, own_processes: int) -> Group:
        name = new_name()
        group = Group({kind: parent / name for kind, parent in self.folders.items()})
        try:
            for folder in group.folders.values():
                folder.mkdir()
            for path, value in _settings(group.folders, limits, own_processes):
                path.write_text(str(value))
        except OSError as error:
            group.remove()
            raise SandboxError(
                f"cannot make the control group {name}: {error}; free memory and groups on this "
                "host, and start the node again"
            ) from error
        return group

    def reap(self) -> int:
        """Remove groups whose node is dead, and end what runs in them; returns how many."""
        stale = [
            folder
            for parent in self.folders.values()
            for folder in parent.glob(f"{PREFIX}*")
            if is_stale(folder)
        ]
        for folder in stale:
            Group({"stale": folder}).remove()
        return len(stale)


@dataclass(frozen=True, slots=True)
class Group:
    """The control group of one sandbox: a folder per controller."""

    folders: dict[str, Path] = field(default_factory=dict[str, Path])

    @property
    def joins(self) -> list[str]:
        """Files to which a process writes 0 to enter the group."""
        return [str(folder / "cgroup.procs") for folder in self.folders.values()]

    def cpu_used_s(self) -> float | None:
        """None: it is not counted."""
        with suppress(OSError):
            if "unified" in self.folders:
                return _field(self.folders["unified"] / "cpu.stat", "usage_usec") / 1e6
            if "cpuacct" in self.folders:
                return int((self.folders["cpuacct"] / "cpuacct.usage").read_text()) / 1e9
        return None

    def num_memory_kills(self) -> int:
        with suppress(OSError):
            if "unified" in self.folders:
                return _field(self.folders["unified"] / "memory.events", "oom_kill")
            if "memory" in self.folders:
                return _field(self.folders["memory"] / "memory.oom_control", "oom_kill")
        return 0

    def kill(self) -> None:
        """Kill every process in it."""
        for folder in self.folders.values():
            _kill_members(folder)

    def remove(self) -> None:
        """Kill what is left in it, and remove it. Blocks shortly: the kernel frees a group only
        after its last process."""
        deadline = time.monotonic() + _REMOVE_S
        for folder in self.folders.values():
            while folder.exists() and time.monotonic() < deadline:
                with suppress(OSError):
                    folder.rmdir()
                    break
                _kill_members(folder)
                time.sleep(0.002)


def _settings(
    folders: dict[str, Path], limits: Limits, own_processes: int
) -> Iterator[tuple[Path, int]]:
    memory_bytes, num_pids = limits.memory_mb << 20, limits.num_processes + own_processes
    if "memory" in folders:
        yield folders["memory"] / "memory.limit_in_bytes", memory_bytes
        with_swap = folders["memory"] / "memory.memsw.limit_in_bytes"
        if with_swap.exists():
            yield with_swap, memory_bytes
    if "pids" in folders:
        yield folders["pids"] / "pids.max", num_pids
    if "unified" in folders:
        yield folders["unified"] / "memory.max", memory_bytes
        if (folders["unified"] / "memory.swap.max").exists():
            yield folders["unified"] / "memory.swap.max", 0
        yield folders["unified"] / "pids.max", num_pids


def group_of(pid: int, proc: Path = Path("/proc")) -> Group:
    """The control group of a process that another program started: to read, not to remove."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
        mountinfo = (proc / "self" / "mountinfo").read_text()
    except OSError:  # it has ended
        return Group()
    own = dict[str, str]()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(",") if controllers else ["unified"], path)
    found = dict[str, Path]()
    for mount, kinds in _mounts(mountinfo):
        for kind in {"memory", "cpuacct", "unified"} & kinds & own.keys():
            folder = mount / own[kind].lstrip("/")
            if kind != "unified" or (folder / "cpu.stat").exists():
                found[kind] = folder
    if "memory" in found:
        found.pop("unified", None)
    return Group(found)


def find_parents(proc: Path = Path("/proc/self")) -> Parents:
    """Where this process may make groups, tried out; prefers v1 controllers where they are used."""
    own = dict[str, str]()
    for line in (proc / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        own |= dict.fromkeys(controllers.split(","), path)
    found = dict[str, Path]()
    for mount, kinds in _mounts((proc / "mountinfo").read_text()):
        for kind in {"memory", "pids", "cpuacct"} & kinds:
            candidates = (mount / own.get(kind, "/").lstrip("/"), mount)
            found |= _first_usable(kind, candidates, "cgroup.procs")
        if "unified" in kinds:
            group = mount / own.get("", "/").lstrip("/")
            found |= _first_usable("unified", (group, group.parent), "memory.max", "pids.max")
    if "memory" in found:
        found.pop("unified", None)
    return Parents(folders=found)


def _mounts(mountinfo: str) -> Iterator[tuple[Path, set[str]]]:
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind == "cgroup":
            yield Path(left.split()[4]), set(options.split(","))
        elif kind == "cgroup2":
            yield Path(left.split()[4]), {"unified"}


def _first_usable(kind: str, folders: tuple[Path, ...], *files: str) -> dict[str, Path]:
    """The first folder in which a new group has these files."""
    for folder in folders:
        trial = folder / new_name()
        with suppress(OSError):
            trial.mkdir()
            try:
                if all((trial / name).exists() for name in files):
                    return {kind: folder}
            finally:
                trial.rmdir()
    return {}


def _field(path: Path, name: str) -> int:
    pairs = (line.split() for line in path.read_text().splitlines())
    return next((int(pair[1]) for pair in pairs if pair[0] == name), 0)


def _kill_members(folder: Path) -> None:
    with suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
