# SPDX-License-Identifier: Apache-2.0
"""What a planner remembers: during a task, and from one episode to the next.

Owns who may read what. Notes of a source are read only by other tasks of the same source, so an
evaluation, which is a separate source, never reads what was learned from training answers, and
the members of a group never read each other's. Notes live in the node's memory; nothing is kept on
disk."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.types import Task

MAX_NOTES = 256
"""Notes kept of one source; the oldest are forgotten first."""
MAX_NOTE_CHARS = 500


class Memory(Protocol):
    """Notes of an agent, as text."""

    def recall(self, task: Task, limit: int) -> Sequence[str]:
        """The newest notes that this task may read, oldest first, at most `limit`."""
        ...

    def remember(self, task: Task, note: str) -> None:
        """Keep a note of this task."""
        ...


@dataclass(slots=True)
class TaskMemory:
    """Notes of one attempt; a new one is empty."""

    _notes: list[str] = field(default_factory=list[str])

    def recall(self, task: Task, limit: int) -> Sequence[str]:
        return self._notes[max(0, len(self._notes) - limit) :]

    def remember(self, task: Task, note: str) -> None:
        self._notes.append(note[:MAX_NOTE_CHARS])


@dataclass(slots=True)
class SourceMemory:
    """Notes of finished tasks, by source."""

    _notes: dict[str, deque[tuple[str, str]]] = field(
        default_factory=dict[str, deque[tuple[str, str]]]
    )
    """Task key and note."""

    def recall(self, task: Task, limit: int) -> Sequence[str]:
        known = self._notes.get(task.source, ())
        readable = [note for key, note in known if key != task.key]
        return readable[max(0, len(readable) - limit) :]

    def remember(self, task: Task, note: str) -> None:
        notes = self._notes.setdefault(task.source, deque(maxlen=MAX_NOTES))
        notes.append((task.key, note[:MAX_NOTE_CHARS]))
