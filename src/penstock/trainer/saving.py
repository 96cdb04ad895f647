# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on their way to the disk, beside the training: copied, written, then told.

Owns the thread that writes them. The trainer pays for one copy of its state and goes on; a second
copy is not made before the first is on disk, so memory holds one at most. The ledger hears of a
checkpoint only when it is complete. What goes wrong here ends the trainer at its next call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from penstock.trainer.checkpoint import Checkpoints, Cursor

LEAVE_S = 5.0
"""A trainer that dies of something else waits no longer for the checkpoint being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """The state at one cursor, which no later step changes."""

    cursor: Cursor
    weights: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    static: Sequence[Path]


class Saver:
    """Writes the checkpoints of one trainer.

    `permit` raises when this trainer may not write any more, and `tell` names what is retained to
    the ledger; both are called in the thread, before and after each write."""

    def __init__(
        self, checkpoints: Checkpoints, *, permit: Callable[[], None], tell: Callable[[], None]
    ) -> None:
        self._checkpoints = checkpoints
        self._permit = permit
        self._tell = tell
        self._changed = threading.Condition()
        self._waiting: _Copy | None = None
        self._is_busy = False
        self._is_closed = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="saver", daemon=True)
        self._thread.start()

    def is_due(self, cursor: Cursor) -> bool:
        """Whether a checkpoint should be taken now; not before the last one is written."""
        with self._changed:
            self._raise_error()
            return not self._is_working and self._checkpoints.is_due(cursor)

    def hand_over(
        self,
        cursor: Cursor,
        *,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        static: Sequence[Path],
    ) -> None:
        """Copy this state once the copy before it is written; the rest happens elsewhere."""
        self.finish()
        copied = _Copy(
            cursor=cursor,
            weights={name: value.detach().clone() for name, value in weights.items()},
            state={name: value.detach().clone() for name, value in state.items()},
            static=static,
        )
        with self._changed:
            self._waiting = copied
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until everything handed over is complete and told."""
        with self._changed:
            while self._error is None and self._is_working:
                self._changed.wait()
            self._raise_error()

    def close(self) -> None:
        """Begin nothing more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join(LEAVE_S)

    @property
    def _is_working(self) -> bool:
        return self._waiting is not None or self._is_busy

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    # --- in the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        """consumes: copies of the trainer's state · produces: complete checkpoints, told
        waits for: the next copy · ends: when it is closed, or at the first error"""
        try:
            while (copied := self._take()) is not None:
                self._write(copied)
                del copied
                self._tell()
                self._put_back()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _write(self, copied: _Copy) -> None:
        self._permit()
        self._checkpoints.save(
            copied.cursor, weights=copied.weights, state=copied.state, static=copied.static
        )

    def _take(self) -> _Copy | None:
        with self._changed:
            while self._waiting is None and not self._is_closed:
                self._changed.wait()
            taken, self._waiting = (None if self._is_closed else self._waiting), None
            self._is_busy = taken is not None
            return taken

    def _put_back(self) -> None:
        with self._changed:
            self._is_busy = False
            self._changed.notify_all()
