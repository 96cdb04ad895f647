# SPDX-License-Identifier: Apache-2.0
"""A task in the Harbor format, as the payload of a task.

The record that the source writes and the node reads: the files at their paths inside, not the
Dockerfile they came from. Reads no file itself."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field

KEY = "harbor"
"""Where a payload has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFile:
    """One file: text, or base64 of what is not UTF-8."""

    text: str = ""
    base64: str = ""
    mode: int = 0o644

    @classmethod
    def of(cls, data: bytes, mode: int) -> TaskFile:
        try:
            return cls(text=data.decode(), mode=mode)
        except UnicodeDecodeError:
            return cls(base64=base64.b64encode(data).decode(), mode=mode)

    @property
    def data(self) -> bytes:
        return base64.b64decode(self.base64) if self.base64 else self.text.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborTask:
    """What a node needs to attempt and to verify a task."""

    name: str
    """The name of its folder."""
    workdir: str
    """Where agent and verifier start."""
    root: str = ""
    """Folder of its root file system, relative to the node's working directory; empty: the programs
    of the host."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment of agent and verifier."""
    verifier_env: Mapping[str, str] = field(default_factory=dict[str, str])
    """What only the verifier gets."""
    folders: tuple[str, ...] = ()
    """Empty folders, by absolute path inside."""
    files: Mapping[str, TaskFile] = field(default_factory=dict[str, TaskFile])
    """What the agent finds, by absolute path inside."""
    tests: Mapping[str, TaskFile] = field(default_factory=dict[str, TaskFile])
    """What only the verifier finds, by path below /tests."""
    agent_timeout_s: float | None = None
    verifier_timeout_s: float = 600.0
    memory_mb: int | None = None
    storage_mb: int | None = None
