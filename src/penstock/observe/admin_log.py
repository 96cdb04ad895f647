# SPDX-License-Identifier: Apache-2.0
"""The log of what operators did to a run: `admin.jsonl`, each line with the hash of the one before.

`admin.head` has the number and hash of the last line. A new line continues from there and not from
what the log ends with, so that a gap stays visible: `penstock audit` finds a line that was changed,
removed or added. Owns both files; judges nothing.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import time
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

import msgspec
from blake3 import blake3

from penstock.durable import read_regular, regular_descriptor, write_durably

LOG, HEAD = "admin.jsonl", "admin.head"
MAX_VALUE_CHARS = 2_000
LOCK_S = 30.0
_RETRY_S = 0.05
_TAIL_BYTES = 1 << 20


class AdminAction(StrEnum):
    RUN_STARTED = "run_started"
    RUN_RESUMED = "run_resumed"
    """With what changed in the run file, if anything did."""
    RUN_STOPPED = "run_stopped"
    TOKEN_ISSUED = "token_issued"
    TOKEN_REVOKED = "token_revoked"
    NAME_REVOKED = "name_revoked"
    """All tokens of a name, for good."""
    KEY_ROTATED = "key_rotated"
    QUARANTINED = "quarantined"
    """A credential gets no more work, by the word of a trainer or of spot checks."""
    SESSION_FORGOTTEN = "session_forgotten"
    NODE_DRAINED = "node_drained"
    """An operator ordered a node to return its work and leave."""
    FORKED = "forked"
    """An operator created a new run from a step of this one."""
    PARTITION_DRAINED = "partition_drained"
    PARTITION_LOST = "partition_lost"
    QUOTA_SET = "quota_set"
    SCALED = "scaled"
    """An operator asked for another size of the rollout pool, or for another mode."""
    NODE_STARTED = "node_started"
    """By the autoscaler; so is the next."""
    NODE_RETIRED = "node_retired"
    NODE_TAGGED = "node_tagged"
    """An operator added or removed tags of a node."""


class AdminEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One line."""

    number: int
    at: float
    action: str
    who: str
    """The user of this host, or the role and name of a token."""
    details: dict[str, str]
    previous: str
    """BLAKE3 of the line before, without its line break; empty for the first."""


class LogHead(NamedTuple):
    """The last line: how many there are, and its hash."""

    number: int = 0
    hash: str = ""

    def __str__(self) -> str:
        return f"{self.number} {self.hash}"


class AdminLog:
    """Of one run folder; any number of processes may append."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / LOG
        self._head = folder / HEAD

    def append(self, action: AdminAction, *, who: str | None = None, **details: object) -> LogHead:
        """On disk when this returns. `who`: by default the user of this process."""
        with self._locked() as log:
            head = self._continued(log)
            entry = AdminEntry(
                number=head.number + 1,
                at=round(time.time(), 3),
                action=action,
                who=(local_user() if who is None else who)[:MAX_VALUE_CHARS],
                details={name: str(value)[:MAX_VALUE_CHARS] for name, value in details.items()},
                previous=head.hash,
            )
            line = msgspec.json.encode(entry)
            os.write(log, line + b"\n")
            os.fsync(log)
            newest = LogHead(entry.number, blake3(line).hexdigest())
            write_durably(self._head, f"{newest}\n".encode())
            return newest

    def head(self) -> LogHead:
        """Of the last line that was written; of none if there is no log."""
        try:
            number, _, hash = read_regular(self._head, 4096).decode().strip().partition(" ")
            return LogHead(int(number), hash)
        except (OSError, ValueError):
            return LogHead()

    @contextmanager
    def _locked(self) -> Generator[int]:
        log = regular_descriptor(self._log, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            _lock(log, self._log)
            yield log
        finally:
            os.close(log)

    def _continued(self, log: int) -> LogHead:
        """Where to continue: at the head, or at the line that a killed process wrote after it."""
        head, size = self.head(), os.fstat(log).st_size
        tail = os.pread(log, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):  # half a line, of a process that was killed
            size -= len(tail) - (tail.rfind(b"\n") + 1)
            os.ftruncate(log, size)
            tail = tail[: tail.rfind(b"\n") + 1]
        last = tail.rstrip(b"\n").rpartition(b"\n")[2]
        try:
            entry = msgspec.json.decode(last, type=AdminEntry)
        except (msgspec.DecodeError, RecursionError):
            return head
        is_next = entry.number == head.number + 1 and entry.previous == head.hash
        return LogHead(entry.number, blake3(last).hexdigest()) if is_next else head


def local_user() -> str:
    """The user of this process."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # in a container
        return f"uid {os.geteuid()}"


def _lock(descriptor: int, path: Path) -> None:
    give_up_at = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > give_up_at:
                raise TimeoutError(
                    f"{path} is locked by another process for {LOCK_S:g} s; end that process"
                ) from None
        time.sleep(_RETRY_S)
