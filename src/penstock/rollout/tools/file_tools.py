# SPDX-License-Identifier: Apache-2.0
"""The built-in tools `list_files`, `read_file` and `write_file`, within one folder.

The folder is the sandbox of an attempt, or one that `penstock tools serve` names. No path leads out
of it: no link is followed, and `..`, absolute paths and NUL are refused.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.rollout.sandbox.files import WorkFolder, at_folder
from penstock.rollout.sandbox.types import FileRefused
from penstock.rollout.tools.types import ToolFailed, ToolResult, ToolSpec

MAX_FILE_BYTES = 1 << 20
_PATH = {"type": "string", "description": "Path below the folder, such as notes/a.txt."}
LIST = ToolSpec(
    name="list_files",
    description="List the files and folders in a folder.",
    parameters={"type": "object", "properties": {"path": {**_PATH, "default": "."}}},
)
READ = ToolSpec(
    name="read_file",
    description="Read a text file.",
    parameters={"type": "object", "properties": {"path": _PATH}, "required": ["path"]},
)
WRITE = ToolSpec(
    name="write_file",
    description="Write a text file; folders are made, and an earlier file is replaced.",
    parameters={
        "type": "object",
        "properties": {"path": _PATH, "text": {"type": "string", "description": "Its content."}},
        "required": ["path", "text"],
    },
)


class Folder(Protocol):
    """Files below one folder; raises FileRefused. A sandbox is one."""

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None: ...
    async def get(self, path: str, *, max_bytes: int) -> bytes: ...
    async def list_files(self, path: str) -> Sequence[str]: ...


@dataclass(frozen=True, slots=True)
class HostFolder:
    """A folder of this machine."""

    _path: Path

    async def opened(self) -> HostFolder:
        return self

    async def put(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._at(lambda folder: folder.put(path, data, mode))

    async def get(self, path: str, *, max_bytes: int) -> bytes:
        return await self._at(lambda folder: folder.get(path, max_bytes))

    async def list_files(self, path: str) -> Sequence[str]:
        return await self._at(lambda folder: folder.list_files(path))

    async def _at(self, action: Callable[[WorkFolder], Any]) -> Any:
        fd = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            return await at_folder(fd, -1, action)
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True)
class FileSession:
    """A ToolSession."""

    _folder: Callable[[], Awaitable[Folder]]

    async def list(self) -> Sequence[ToolSpec]:
        return (LIST, READ, WRITE)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        folder = await self._folder()
        path = str(arguments.get("path", "."))
        try:
            return ToolResult(text=await _act(folder, name, path, str(arguments.get("text", ""))))
        except FileRefused as refusal:
            return ToolResult(text=str(refusal), is_error=True)

    async def recover(self) -> None:
        """An operation that was given up ends by itself."""

    async def close(self) -> None:
        """The folder is its owner's."""


async def _act(folder: Folder, name: str, path: str, text: str) -> str:
    if name == LIST.name:
        return "\n".join(await folder.list_files(path)) or "(empty)"
    if name == READ.name:
        return (await folder.get(path, max_bytes=MAX_FILE_BYTES)).decode(errors="replace")
    if name != WRITE.name:
        raise ToolFailed(f"there is no tool {name!r}")
    data = text.encode(errors="replace")
    if len(data) > MAX_FILE_BYTES:
        raise FileRefused(f"the text has {len(data):,} bytes; at most {MAX_FILE_BYTES:,} pass")
    await folder.put(path, data)
    return f"wrote {len(data):,} bytes to {path}"
