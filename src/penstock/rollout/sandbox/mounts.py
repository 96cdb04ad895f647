# SPDX-License-Identifier: Apache-2.0
"""The files of a sandbox in a separate mount namespace, held by a small process.

Owns the one file system on which everything a sandbox writes lies: a tmpfs with a size, so that the
disk limit is exact, and which ends with the namespace, so that nothing is left, even after SIGKILL
of the node. Grants are mounted there too, by the node's own user: a program's user could not reach
them through private folders.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SandboxError
from penstock.redaction import register_secret
from penstock.rollout.sandbox.child import Child, start_child
from penstock.rollout.sandbox.files import make_folder
from penstock.rollout.sandbox.types import WORK_DIR, Grants, SandboxSpec
from penstock.rollout.sandbox.walls import (
    HOST_PATH,
    NO_NAMESPACES,
    START_S,
    end_child,
    expect_ready,
)

_ETC = {
    "passwd": "user:x:1000:1000:user:/work:/bin/sh\n",
    "group": "user:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
_WRITTEN = {"/tmp": "tmp", "/dev/shm": "shm", WORK_DIR: "work"}
"""What programs write: its place inside, and on our file system."""
PLACES = "places"
"""The folders that a spec adds to them."""
ROOT = "root"
"""Where the root file system of a spec is mounted."""
_MAX_SECRET_BYTES = 1 << 20
_SCRIPT = 'mount -t tmpfs -o "$0" penstock "$1" && echo ready && IFS= read -r line && eval "$line"'


def _chain(folder: Path, spec: SandboxSpec) -> tuple[str, str, tuple[str, ...]] | None:
    """For a folder below one that programs write: the first part of its path inside, the same on
    our file system, and the other parts."""
    own = {f"/{name}": f"{PLACES}/{name}" for name in spec.writable}
    for area, name in {**_WRITTEN, **own}.items():
        if folder.is_relative_to(area):
            first, *rest = folder.relative_to(area).parts or ("",)
            if not first or ".." in (first, *rest):
                raise SandboxError(f"{folder} cannot be granted: programs write there; grant less")
            return f"{area}/{first}", f"{name}/{first}", tuple(rest)
    return None


def mount_point() -> str:
    """An empty folder of this user, the same for all sandboxes: each mounts over it unseen."""
    path = Path(tempfile.gettempdir()).resolve() / f"penstock-sandbox-{os.geteuid()}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o711)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise SandboxError(f"{path} belongs to someone else; remove it, or set TMPDIR")
    path.chmod(0o711)
    return str(path)


def disk_options(disk_mb: int) -> str:
    """Options of the file system on which the files of a sandbox lie."""
    return f"size={disk_mb}m,nr_inodes={1024 + 128 * disk_mb},mode=0711,nosuid,nodev"


@dataclass(slots=True, kw_only=True)
class Mounts:
    """What one sandbox may write, and what is granted to it, below `path` in the namespace of
    process `pid`."""

    spec: SandboxSpec
    owner: int
    """The user of the programs, or -1 for our own."""
    has_state: bool = False
    """Whether the back end needs its own folder `state`, beyond the reach of programs."""
    path: str = field(default_factory=mount_point)
    folder_fd: int = -1
    """The work folder."""
    _holder: Child | None = None

    @property
    def enter(self) -> list[str]:
        """The command that runs another in the namespace."""
        assert self._holder is not None, "open() comes first"
        user = [] if self.owner >= 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--mount", f"--target={self._holder.pid}", *user, "--"]

    async def open(self) -> None:
        disk_mb = self.spec.limits.disk_mb
        options = disk_options(disk_mb)
        user = [] if self.owner >= 0 else ["--user", "--map-root-user"]
        argv = ["unshare", "--mount", "--propagation", "private", *user, "--"]
        argv += ["sh", "-c", _SCRIPT, options, self.path]
        self._holder = await start_child(argv, env={"PATH": HOST_PATH})
        await self._expect_ready("cannot make a file system for a sandbox")
        root = os.open(f"/proc/{self._holder.pid}/root{self.path}", os.O_RDONLY | os.O_DIRECTORY)
        try:
            mounts = self._fill(root)
            shown = PLACES if self.spec.writable else "work"
            self.folder_fd = os.open(shown, os.O_RDONLY | os.O_DIRECTORY, dir_fd=root)
        finally:
            os.close(root)
        if mounts:
            line = " && ".join((*mounts, "echo ready && read -r _"))
            self._holder.stdin.write(line.encode() + b"\n")
            await self._expect_ready("cannot mount what the sandbox was granted")

    @property
    def granted_folders(self) -> dict[str, str]:
        """Read-only mounts in their order: the place inside, and the source. A place below a folder
        that programs write hangs on a chain of ours: else a program could put a link there, and the
        next program's mount would follow it."""
        folders = self.spec.grants.folders
        found = (_chain(folder, self.spec) for folder in folders)
        chains = [chain for chain in found if chain is not None]
        mounts = {inner: f"{self.path}/chains/{name}" for inner, name, _ in chains}
        own = {str(folder): f"{self.path}/folders/{at}" for at, folder in enumerate(folders)}
        return {**mounts, **dict(sorted(own.items()))}

    def _make_chain(self, root: int, folder: Path) -> None:
        if (chain := _chain(folder, self.spec)) is None:
            return
        _, name, rest = chain
        with suppress(FileExistsError):
            if rest or folder.is_dir():
                make_folder(name, root)
                os.chown(name, self.owner, self.owner, dir_fd=root)
            else:
                write_file(root, name, b"", 0o444, self.owner)
        place = "chains"
        *above, last = (*name.split("/"), *rest)
        for part in above:
            place = f"{place}/{part}"
            with suppress(FileExistsError):
                make_folder(place, root)
        with suppress(FileExistsError):
            if folder.is_dir():
                make_folder(f"{place}/{last}", root)
            else:
                write_file(root, f"{place}/{last}", b"", 0o444, -1)

    def make_folder(self, name: str) -> int:
        """A new folder in `state`; returns a descriptor of it."""
        assert self._holder is not None and self.has_state, "open() comes first"
        path = f"/proc/{self._holder.pid}/root{self.path}/state/{name}"
        os.mkdir(path, 0o700)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    async def close(self) -> None:
        if self.folder_fd >= 0:
            os.close(self.folder_fd)
            self.folder_fd = -1
        holder, self._holder = self._holder, None
        if holder is not None:
            await end_child(holder)

    async def _expect_ready(self, what: str) -> None:
        assert self._holder is not None
        async with asyncio.timeout(START_S):
            await expect_ready(self._holder, what, NO_NAMESPACES)

    def _fill(self, root: int) -> list[str]:
        """Make the folders and files; returns the commands that mount the grants."""
        for name in ("work", "tmp", "shm"):
            os.mkdir(name, 0o700, dir_fd=root)
            os.chown(name, self.owner, self.owner, dir_fd=root)
        for name in ("etc", "secrets", "sockets", "folders", "chains", "state", PLACES, ROOT):
            make_folder(name, root)
        for name in self.spec.writable:
            os.mkdir(f"{PLACES}/{checked_name(name)}", 0o700, dir_fd=root)
            os.chown(f"{PLACES}/{name}", self.owner, self.owner, dir_fd=root)
        for name, text in _ETC.items():
            write_file(root, f"etc/{name}", text.encode(), 0o444, -1)
        for name, source in self.spec.grants.secrets.items():
            write_file(
                root, f"secrets/{checked_name(name)}", read_secret(source), 0o400, self.owner
            )
        state = f"mount -t tmpfs -o size=16m,mode=0700 penstock {_quoted(self.path)}/state"
        own = [state] if self.has_state else []
        return [*own, *self._mount_sockets(root), *self._mount_root(), *self._mount_folders(root)]

    def _mount_root(self) -> list[str]:
        source = self.spec.root
        if source is None:
            return []
        if not source.is_absolute() or not (source / "usr").is_dir():
            raise SandboxError(
                f"{source} is not a root file system: it has no folder usr; unpack one there"
            )
        for name in ("etc", *self.spec.writable):  # these are read by their path on the host
            if (source / name).is_symlink():
                raise SandboxError(
                    f"{source / name} is a link, and would lead to a folder of this host; make it "
                    "a folder in the root file system"
                )
        return [f"mount --rbind {_quoted(source)} {_quoted(self.path)}/{ROOT}"]

    def _mount_sockets(self, root: int) -> list[str]:
        commands = list[str]()
        for name, source in self.spec.grants.sockets.items():
            mode = source.stat().st_mode if source.exists() else 0
            if not stat.S_ISSOCK(mode) or (self.owner >= 0 and not mode & 0o002):
                raise SandboxError(
                    f"{source}, granted to a sandbox as {name}, is not a socket that its user may "
                    "connect to; listen on it first, with mode 0666 in a private folder"
                )
            write_file(root, f"sockets/{checked_name(name)}", b"", 0o444, -1)
            commands.append(f"mount --bind {_quoted(source)} {_quoted(self.path)}/sockets/{name}")
        return commands

    def _mount_folders(self, root: int) -> list[str]:
        commands = list[str]()
        for number, source in enumerate(self.spec.grants.folders):
            if not source.exists() or not source.is_absolute():
                raise SandboxError(
                    f"{source}, granted to a sandbox, does not exist; give the absolute path of a "
                    "folder or file"
                )
            target = f"folders/{number}"
            if source.is_dir():
                make_folder(target, root)
            else:
                write_file(root, target, b"", 0o444, -1)
            self._make_chain(root, source)
            commands.append(f"mount --rbind {_quoted(source)} {_quoted(self.path)}/{target}")
            commands += self._hide_in(source.resolve(), f"{self.path}/{target}")
        return commands

    def _hide_in(self, source: Path, target: str) -> list[str]:
        """Empty file systems over what a granted folder contains and must not show."""
        options = "size=4k,mode=0555,ro,nosuid,nodev"
        return [
            f"mount -t tmpfs -o {options} penstock {_quoted(f'{target}/{path}')}"
            for path in hidden_within(self.spec.grants, source)
        ]


def hidden_within(grants: Grants, source: Path) -> list[Path]:
    """Hidden folders in this granted one, relative to it."""
    found = (path.resolve() for path in grants.hidden if path.is_dir())
    return sorted({path.relative_to(source) for path in found if path.is_relative_to(source)})


def checked_name(name: str) -> str:
    if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name[0] == ".":
        raise SandboxError(f"{name!r} cannot name a secret or socket; use letters, digits, - _ .")
    return name


def _quoted(path: str | Path) -> str:
    if "\n" in str(path):
        raise SandboxError(f"{str(path)!r} contains a line break; grant another path")
    return shlex.quote(str(path))


def read_secret(source: Path) -> bytes:
    try:
        with source.open("rb") as file:
            content = file.read(_MAX_SECRET_BYTES)
        register_secret(content.decode(errors="replace"))
        return content
    except OSError as error:
        raise SandboxError(
            f"cannot read {source}, granted to a sandbox as a secret: {error.strerror}; "
            "correct the path or its mode"
        ) from None


def write_file(root: int, name: str, data: bytes, mode: int, owner: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with open(os.open(name, flags, mode, dir_fd=root), "wb") as file:
        file.write(data)
        os.fchmod(file.fileno(), mode)  # whatever the umask
        os.fchown(file.fileno(), owner, owner)
