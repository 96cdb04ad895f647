# SPDX-License-Identifier: Apache-2.0
"""How far a tracker is: `trackers/NAME.json` in the run folder, and the lock of who sends to it."""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.durable import open_own, read_own, write_durably
from penstock.errors import BadRequest, TrackerError
from penstock.wire.codec import JSON, decode, encode_json


@dataclass(frozen=True, slots=True, kw_only=True)
class SentPoints:
    """What a tracker has of one policy."""

    seq: int = 0
    """The last batch."""
    step: int = 0
    evaluated: int = -1
    """The last step whose evaluation it has."""
    count: int = 0
    """Points."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerCursor:
    id: str
    """Of this run folder; the tracker's runs are named by it."""
    policies: dict[str, SentPoints] = field(default_factory=dict[str, SentPoints])
    arrivals: dict[int, int] = field(default_factory=dict[int, int])
    """The last rollout, by partition, of a tracker that takes rollouts."""

    def of(self, policy: str) -> SentPoints:
        return self.policies.get(policy, SentPoints())

    def after(self, policy: str, sent: SentPoints) -> TrackerCursor:
        return replace(self, policies={**self.policies, policy: sent})


class CursorFile:
    """The cursor of one tracker; one process has it at a time."""

    def __init__(self, run_folder: Path, tracker: str) -> None:
        self._tracker = tracker
        self._path = run_folder / "trackers" / f"{tracker.replace(':', '.')}.json"

    @contextmanager
    def locked(self) -> Generator[None]:
        """Ends with the process, however that ends."""
        self._path.parent.mkdir(exist_ok=True)
        lock = open_own(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise TrackerError(
                    f"another process sends to {self._tracker}: the running run does, or another "
                    "`penstock track`; wait for its end"
                ) from None
            yield
        finally:
            os.close(lock)

    def read(self) -> TrackerCursor:
        """A new cursor is on disk before its id is used, so that the id never changes."""
        try:
            return decode(read_own(self._path, 1 << 20), TrackerCursor, media_type=JSON)
        except FileNotFoundError:
            cursor = TrackerCursor(id=uuid.uuid4().hex)
            self.write(cursor)
            return cursor
        except BadRequest as error:
            raise TrackerError(
                f"{self._path} is damaged: {error}; delete it to send all points again, to a new "
                f"run of {self._tracker}"
            ) from None

    def write(self, cursor: TrackerCursor) -> None:
        write_durably(self._path, encode_json(cursor))
