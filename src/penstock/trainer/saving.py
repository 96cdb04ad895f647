# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on their way to the disk, beside the training: copied, written, then told.

The trainer pays for one copy of its state and goes on; a second
copy is not made before the first is on disk, so memory holds one at most. The ledger hears of a
checkpoint only when it is complete. What goes wrong here ends the trainer at its next call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from penstock.trainer.beside import Beside
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
        self._beside = Beside("saver", self._write)

    def is_due(self, cursor: Cursor) -> bool:
        """Whether a checkpoint should be taken now; not before the last one is written."""
        return not self._beside.is_working and self._checkpoints.is_due(cursor)

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
        self._beside.put(copied)

    def finish(self) -> None:
        """Wait until everything handed over is complete and told."""
        self._beside.finish()

    def close(self) -> None:
        """Begin nothing more."""
        self._beside.close(LEAVE_S)

    def _write(self, copied: _Copy) -> None:
        """In the thread."""
        self._permit()
        self._checkpoints.save(
            copied.cursor, weights=copied.weights, state=copied.state, static=copied.static
        )
        del copied
        self._tell()
