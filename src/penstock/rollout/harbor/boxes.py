# SPDX-License-Identifier: Apache-2.0
"""The sandboxes of a Harbor task: one for the agent, and a fresh one for the verifier.

Owns which folders are writable, what the files are at the start, and the bounds. The verifier's
gets the agent's files, but neither its processes nor its temporary files, and no link that leaves
its folder. Runs no agent and no test itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath

from penstock.errors import SandboxError
from penstock.rollout.isolation import Isolation, Opened, Places, Use
from penstock.rollout.proxied_sandbox import ProxiedSandbox
from penstock.rollout.sandbox.namespaces import NamespaceSandbox
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.types import Limits, Sandbox
from penstock.tasks.harbor import HarborTask, TaskFile

HOME, LOGS, TESTS = "root", "logs", "tests"
VERIFIER_LOGS = f"{LOGS}/verifier"
_LOG_FOLDERS = (VERIFIER_LOGS, f"{LOGS}/agent", f"{LOGS}/artifacts")
_ROOM_MB = 64
"""What tests and their results may add to the files of an agent."""
_COPY = 'cp -a "$0/." "$1/"'


@asynccontextmanager
async def agent_box(
    isolation: Isolation,
    task: HarborTask,
    *,
    folders: Sequence[Path],
    sockets: Mapping[str, Path],
    row_id: str,
) -> AsyncGenerator[Sandbox]:
    """A started sandbox with the files of the task. Its limit `wall_s` is the time of the agent."""
    bounds = _bounds(isolation.settings_of(Use.WORKFLOW).limits, task)
    if task.agent_timeout_s is not None:
        bounds = replace(bounds, wall_s=task.agent_timeout_s)
    places = Places(root=_root(task), writable=_places(task))
    copies = [name for name in places.writable if places.root and (places.root / name).is_dir()]
    box = await isolation.open(
        Use.WORKFLOW,
        folders=(*folders, *(Path(places.root or "/", name) for name in copies)),
        sockets=sockets,
        limits=bounds,
        row_id=row_id,
        places=places,
    )
    async with Opened(box):
        for name in copies:
            await _copy_of_root(box, str(Path(places.root or "/", name)), name)
        await _make_folders(inner_box(box), (*_LOG_FOLDERS, *task.folders))
        await _put(box, {path.lstrip("/"): file for path, file in task.files.items()})
        yield box


@asynccontextmanager
async def verifier_box(
    isolation: Isolation, task: HarborTask, agent: Sandbox, *, row_id: str
) -> AsyncGenerator[Sandbox]:
    """A started sandbox with what the agent left, and the tests. Raises FileRefused if the agent
    left more than can be copied."""
    bounds = _bounds(isolation.settings_of(Use.TOOLS).limits, task)
    bounds = replace(bounds, wall_s=task.verifier_timeout_s, disk_mb=bounds.disk_mb + _ROOM_MB)
    places = Places(root=_root(task), writable=(*_places(task), TESTS))
    box = await isolation.open(Use.TOOLS, limits=bounds, row_id=row_id, places=places)
    async with Opened(box):
        inner = inner_box(box)
        await inner.take_files(inner_box(agent), but={VERIFIER_LOGS})
        await _make_folders(inner, _LOG_FOLDERS)
        await _put(box, {f"{TESTS}/{path}": file for path, file in task.tests.items()})
        yield box


def inner_box(box: Sandbox) -> NamespaceSandbox:
    """The sandbox that has the files; `Isolation.open` makes no other for places."""
    inner = box.inner if isinstance(box, ProxiedSandbox) else box
    assert isinstance(inner, NamespaceSandbox)
    return inner


def _places(task: HarborTask) -> tuple[str, ...]:
    """First parts of all paths that the task writes, the home folder, and /logs."""
    paths = (*task.folders, *task.files)
    found = (PurePosixPath(path).parts[1] for path in paths)
    return tuple(dict.fromkeys((HOME, LOGS, *found)))


def _root(task: HarborTask) -> Path | None:
    return Path(task.root).expanduser().absolute() if task.root else None


def _bounds(limits: Limits, task: HarborTask) -> Limits:
    """The limits of the run file; a task may ask for less."""
    return replace(
        limits,
        memory_mb=min(limits.memory_mb, task.memory_mb or limits.memory_mb),
        disk_mb=min(limits.disk_mb, task.storage_mb or limits.disk_mb),
    )


async def _copy_of_root(box: Sandbox, source: str, name: str) -> None:
    """A writable folder starts with what the root file system has there."""
    done = await run(box, ["sh", "-c", _COPY, source, f"/{name}"])
    if done.exit.code != 0:
        why = done.stderr.decode(errors="replace").strip()[-300:]
        raise SandboxError(
            f"cannot copy {source} of a root file system into a sandbox: {why or 'cp failed'}; "
            "it needs sh and cp, files that everyone may read, and room (sandbox.workflow.limits)"
        )


async def _make_folders(box: NamespaceSandbox, folders: Sequence[str]) -> None:
    for folder in folders:
        await box.make_folder(folder.strip("/"))


async def _put(box: Sandbox, files: Mapping[str, TaskFile]) -> None:
    await asyncio.gather(
        *(box.put(path, file.data, mode=file.mode) for path, file in files.items())
    )
