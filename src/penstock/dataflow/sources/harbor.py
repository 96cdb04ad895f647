# SPDX-License-Identifier: Apache-2.0
"""Tasks from a folder in the Harbor format: each folder with a task.toml is one task.

Owns which file of a task is where inside, and which root file system it gets. A task carries its
own files, so a node needs no copy of the folder. Refuses by name and line what it cannot honour.
Runs nothing: the node does."""

from __future__ import annotations

import errno
import fnmatch
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import dropwhile
from pathlib import Path, PurePosixPath

from blake3 import blake3

from penstock.dataflow.sources.harbor_dockerfile import MAX_CHARS, Copy, Image, parse_dockerfile
from penstock.dataflow.sources.harbor_settings import Settings, read_settings
from penstock.dataflow.sources.source import Source
from penstock.durable import COPIED_BYTES, open_regular, read_regular
from penstock.errors import ConfigError
from penstock.tasks.harbor import KEY, HarborTask, TaskFile
from penstock.types import JsonObject

HOST_IMAGES = ("debian", "ubuntu", "python")
"""Images without RUN that the programs of the host stand in for, whatever their tag."""
SYSTEM = frozenset(
    ("bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "proc", "run", "sbin", "sys")
) | {"tmp", "usr", "var", "work"}
"""First parts of paths that are read-only inside, or the sandbox's own."""
RESERVED = frozenset(("logs", "tests", "solution"))
"""First parts of paths that the format uses itself."""
MAX_TASK_BYTES = 1 << 20
"""Files of one task with their names, and its instruction: they travel with every lease."""
MAX_ENVIRONMENT_BYTES = 4 << 30
"""Files in environment/, together: they are all read to name them."""
MAX_LOOKED_AT = 1_000_000
"""Names in environment/, each time that COPY lists them: few lines can do so thousands of times."""
NUM_LISTED = 20
"""Tasks that one message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborSpec:
    """Which tasks, and what stands in for their images."""

    path: str
    """A folder of tasks, or one task."""
    roots: Mapping[str, str] = field(default_factory=dict[str, str])
    """Name of a task, digest of its environment/, or image: folder of a root file system."""
    agent_timeout_s: float | None = None
    """At most so long, whatever task.toml says."""
    verifier_timeout_s: float | None = None


@dataclass(slots=True)
class Room:
    """For the files of one task. What is read counts at once: a few lines of a Dockerfile can name
    a file thousands of times."""

    folder: Path
    """Of the task."""
    left: int = MAX_TASK_BYTES
    names_left: int = field(default_factory=lambda: MAX_LOOKED_AT)

    def read(self, path: Path, name: str = "") -> bytes:
        """The file that the task carries by this name. Raises ConfigError."""
        self._take(len(name))
        try:
            content = read_regular(path, self.left)
        except OSError as error:
            if error.errno == errno.EFBIG:
                self._take(self.left + 1)
            raise ConfigError(f"{path} cannot be read: {error}; put a file there") from None
        self._take(len(content))
        return content

    def look_at(self, paths: list[Path]) -> list[Path]:
        self.names_left -= len(paths)
        if self.names_left < 0:
            raise ConfigError(
                f"{self.folder}: COPY lists more than {MAX_LOOKED_AT:,} names, each line counted; "
                "copy a folder as a whole, or put the files into a root file system"
            )
        return paths

    def _take(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise ConfigError(
                f"{self.folder}: its instruction and files have more than {MAX_TASK_BYTES:,} bytes "
                "together, with names, each copy counted; put large files into a root file system, "
                "and name it under harbor.roots"
            )


def open_harbor(
    name: str,
    spec: HarborSpec,
    *,
    weight: float = 1.0,
    limit: int | None = None,
    workflow: str = "",
) -> Source:
    """The tasks of a folder, in the order of their names, again and again. Reads them all."""
    payloads = read_tasks(name, spec)
    digest = blake3(json.dumps(payloads, sort_keys=True).encode()).hexdigest()

    def make(ordinal: int, seed: int) -> JsonObject:
        return payloads[ordinal % len(payloads)]

    return Source(
        name=name,
        weight=weight,
        make=make,
        limit=limit,
        workflow=workflow,
        hash_content=lambda: digest,
    )


def read_tasks(source: str, spec: HarborSpec) -> list[JsonObject]:
    """The payload of each task. Raises one ConfigError that names every task it cannot use."""
    found, problems = list[JsonObject](), list[str]()
    named = Path(spec.path).expanduser()
    for folder in _task_folders(source, named):
        try:
            if folder != named:  # the run file may name a link
                _refuse_link(folder)
            found.append(_payload(folder, spec))
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        count = f"{len(problems)} task{'s' * (len(problems) != 1)} cannot be used"
        lines = [f"source {source!r}: {count}", *(f"  {one}" for one in problems[:NUM_LISTED])]
        more = len(problems) - NUM_LISTED
        raise ConfigError("\n".join([*lines, *([f"  … and {more} more"] if more > 0 else [])]))
    return found


def _task_folders(source: str, path: Path) -> list[Path]:
    if (path / "task.toml").is_file():
        return [path]
    is_task = (one for one in path.iterdir()) if path.is_dir() else ()
    found = sorted(one for one in is_task if (one / "task.toml").is_file())
    if not found:
        where = f"relative to the working directory, {Path.cwd()}"
        raise ConfigError(
            f"source {source!r}: {path} has no Harbor tasks: no folder in it has a task.toml; name "
            f"the folder of the tasks, {where}"
        )
    return found


def _payload(folder: Path, spec: HarborSpec) -> JsonObject:
    room = Room(folder=folder)
    task = read_task(folder, spec, room)
    instruction = _instruction(folder / "instruction.md", room)
    return {"prompt": instruction, KEY: json.loads(json.dumps(asdict(task)))}


def read_task(folder: Path, spec: HarborSpec, room: Room | None = None) -> HarborTask:
    """Raises ConfigError, which names the file and the line."""
    room = room or Room(folder=folder)
    for path in sorted(folder.rglob("*")):
        _refuse_link(path)
    settings = read_settings(folder / "task.toml")
    image = _image(folder, settings)
    root = _root(folder, spec, image, has_image=bool(settings.docker_image))
    workdir = settings.workdir or image.workdir
    if not workdir:
        raise ConfigError(
            f"{folder / 'environment' / 'Dockerfile'}: there is no WORKDIR; write one, such as "
            "WORKDIR /app"
        )
    _check_place(workdir, f"{folder}: the working directory")
    copies = () if settings.docker_image else image.copies
    files = dict(_copied(folder / "environment", copies, room))
    tests = dict[str, TaskFile]()
    for path in _files_below(folder / "tests"):
        name = str(path.relative_to(folder / "tests"))
        tests[name] = _read(path, name, room)
    if "test.sh" not in tests:
        raise ConfigError(f"{folder / 'tests' / 'test.sh'} is missing; write the verifier there")
    return HarborTask(
        name=folder.name,
        workdir=workdir,
        root=root,
        env={**image.env, **settings.env},
        verifier_env=settings.verifier_env,
        folders=(workdir,),
        files=files,
        tests=tests,
        agent_timeout_s=_least(settings.agent_timeout_s, spec.agent_timeout_s),
        verifier_timeout_s=_least(settings.verifier_timeout_s, spec.verifier_timeout_s) or 600.0,
        memory_mb=settings.memory_mb,
        storage_mb=settings.storage_mb,
    )


def _least(*values: float | None) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _instruction(path: Path, room: Room) -> str:
    """Without the marker lines that keep it out of training data by accident."""
    try:
        text = room.read(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}; write the instruction there") from None
    lines = re.sub("\r\n?", "\n", text).splitlines(keepends=True)
    text = "".join(dropwhile(_is_canary, lines)).lstrip("\n")
    if not text.strip():
        raise ConfigError(f"{path} is empty; write the instruction there")
    return text


def _is_canary(line: str) -> bool:
    """A comment with the word; no pattern, which a line of the word alone would hold up."""
    line = line.strip().lower()
    is_comment = line.startswith("#") or (line.startswith("<!--") and line.endswith("-->"))
    return is_comment and "canary" in line


def _image(folder: Path, settings: Settings) -> Image:
    environment = folder / "environment"
    for name in ("docker-compose.yaml", "docker-compose.yml", ".dockerignore"):
        if (environment / name).exists():
            raise ConfigError(f"{environment / name} is not supported; use a Dockerfile alone")
    path = environment / "Dockerfile"
    if path.is_file():
        try:
            text = read_regular(path, 4 * MAX_CHARS).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}; correct it") from None
        image = parse_dockerfile(text, str(path))
    elif settings.docker_image:
        image = Image(base="", workdir="", env={}, copies=(), run_lines=())
    else:
        raise ConfigError(f"{path} is missing; write it, such as FROM python:3.12-slim")
    if not settings.docker_image:
        return image
    return Image(
        base=settings.docker_image,
        workdir=image.workdir,
        env=image.env,
        copies=(),
        run_lines=(),  # the image has their effects
    )


def _root(folder: Path, spec: HarborSpec, image: Image, *, has_image: bool) -> str:
    """The root file system: by task, by environment, by image, or the host's."""
    digest = environment_digest(folder / "environment")
    keys = (folder.name, digest) if image.run_lines else (folder.name, digest, image.base)
    for key in keys:
        if key in spec.roots:
            root = spec.roots[key]
            if not (Path(root).expanduser() / "usr").is_dir():
                raise ConfigError(
                    f"{folder}: harbor.roots.{key}: {root} is not a root file system: it has no "
                    "folder usr; unpack one there"
                )
            return root
    place = folder / "task.toml" if has_image else folder / "environment" / "Dockerfile"
    if image.run_lines:
        raise ConfigError(
            f"{place}:{image.run_lines[0]}: RUN is not run here; make the root file system "
            f"beforehand and name it: harbor.roots: {{{folder.name}: FOLDER}} (or by the digest "
            f"{digest}, for all tasks with this environment)"
        )
    name = image.base.removeprefix("docker.io/").removeprefix("library/")
    if re.split("[:@]", name)[0] not in HOST_IMAGES:
        raise ConfigError(
            f"{place}: there is no root file system for the image {image.base}; make one, and name "
            f"it: harbor.roots: {{'{image.base}': FOLDER}} (the host's programs stand in for "
            f"{', '.join(HOST_IMAGES)})"
        )
    return ""


def environment_digest(folder: Path) -> str:
    """Names the content of an environment/ in `harbor.roots`. Raises ConfigError."""
    found, left = blake3(), MAX_ENVIRONMENT_BYTES
    for path in _files_below(folder):
        name = str(path.relative_to(folder)).encode()
        found.update(len(name).to_bytes(4, "little") + name)
        content = blake3()
        for piece in _pieces(path):
            content.update(piece)
            left -= len(piece)
            if left < 0:
                raise ConfigError(
                    f"{folder} has more than {MAX_ENVIRONMENT_BYTES:,} bytes; put large files into "
                    "a root file system, and name it under harbor.roots"
                )
        found.update(content.digest())
    return found.hexdigest()[:16]


def _pieces(path: Path) -> Iterator[bytes]:
    """Of any file, however long: an image may have its effects already."""
    try:
        with open_regular(path) as file:
            while piece := file.read(COPIED_BYTES):
                yield piece
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}; put a file there") from None


def _check_place(path: str, what: str) -> None:
    first = PurePosixPath(path).parts[1:2]
    if not first or first[0] in SYSTEM:
        raise ConfigError(
            f"{what} is {path}, which is read-only inside; use a folder such as /app, or put the "
            "file into a root file system"
        )
    if first[0] in RESERVED:
        raise ConfigError(f"{what} is {path}, a place of the format itself; use another folder")


def _copied(context: Path, copies: tuple[Copy, ...], room: Room) -> Iterator[tuple[str, TaskFile]]:
    """Files by absolute path inside, in the order of the instructions."""
    for copy in copies:
        place = f"{context / 'Dockerfile'}:{copy.line}: COPY"
        _check_place(copy.target, f"{place}: its target")
        for pattern in copy.sources:
            for source in _matching(context, pattern, place, room):
                yield from _copy_one(source, copy, room)


def _matching(context: Path, pattern: str, place: str, room: Room) -> list[Path]:
    if not any(char in pattern for char in "*?["):
        path = context / pattern
        if not path.exists():
            raise ConfigError(f"{place}: environment/{pattern} does not exist; correct the path")
        return [path]
    folder = context / PurePosixPath(pattern).parent
    names = room.look_at(sorted(folder.iterdir()) if folder.is_dir() else [])
    last = PurePosixPath(pattern).name
    found = [path for path in names if fnmatch.fnmatchcase(path.name, last)]
    if not found:
        raise ConfigError(f"{place}: no file matches environment/{pattern}; correct the pattern")
    return found


def _copy_one(source: Path, copy: Copy, room: Room) -> Iterator[tuple[str, TaskFile]]:
    """A folder's content goes into the target; a file becomes it, or goes into it."""
    target = PurePosixPath(copy.target)
    if source.is_dir():
        for path in room.look_at(sorted(source.rglob("*"))):
            if not path.is_file():
                continue
            name = str(target / path.relative_to(source))
            yield name, _read(path, name, room, copy.mode)
    else:
        name = str(target / source.name if copy.target.endswith("/") else target)
        yield name, _read(source, name, room, copy.mode)


def _refuse_link(path: Path) -> None:
    """A task of other people must not name files of this machine."""
    if path.is_symlink():
        raise ConfigError(f"{path} is a link; put the file or folder itself there")


def _files_below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def _read(path: Path, name: str, room: Room, mode: int | None = None) -> TaskFile:
    is_program = os.access(path, os.X_OK) and path.stat().st_mode & 0o100
    return TaskFile.of(room.read(path, name), mode or (0o755 if is_program else 0o644))
