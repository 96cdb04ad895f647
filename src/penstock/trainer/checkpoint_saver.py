# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on their way to the disk, beside the training: copied, written, then told.

The trainer pays for one copy of its state and goes on; a second
copy is not made before the first is on disk, so memory holds one at most. The ledger hears of a
checkpoint only when it is complete. What goes wrong here ends the trainer at its next call.

The ranks of a gang write their shares of the state each for itself, and beside the training, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.trainer.background_worker import Beside
from penstock.trainer.checkpoint import Checkpoints, Cursor, Together
from penstock.trainer.durable_files import partial_name
from penstock.trainer.state_shards import Shares, copy_shares, put_share

LEAVE_S = 5.0
"""A trainer that dies of something else waits no longer for the checkpoint being written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    """The state at one cursor, which no later step changes."""

    cursor: Cursor
    weights: Mapping[str, Tensor]
    state: Shares
    static: Sequence[Path]
    token: int
    memory: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """The state is as it was."""

    cursor: Cursor
    memory: Mapping[str, Any]


class Saver:
    """Writes the checkpoints of one trainer; in its first rank, where it has several.

    `permit` raises when this trainer may not write any more, and `tell` names what is retained to
    the ledger; both are called in the thread, before and after each write."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        permit: Callable[[], None],
        tell: Callable[[], None],
        num_ranks: int = 1,
    ) -> None:
        self._checkpoints = checkpoints
        self._permit = permit
        self._tell = tell
        self._num_ranks = num_ranks
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
        memory: Mapping[str, Any],
        token: int = 0,
    ) -> None:
        """Copy this state once the copy before it is written; the rest happens elsewhere.

        token: what the other ranks were given for their shares of the state."""
        self.finish()
        copied = _Copy(
            cursor=cursor,
            weights={name: value.detach().clone() for name, value in weights.items()},
            state=copy_shares(state),
            static=static,
            token=token,
            memory=memory,
        )
        self._beside.put(copied)

    def move(self, cursor: Cursor, memory: Mapping[str, Any]) -> None:
        """The last state is also that at this cursor."""
        self.finish()
        self._beside.put(_Move(cursor=cursor, memory=memory))

    def finish(self, within_s: float | None = None) -> bool:
        """Wait until everything handed over is complete and told, or no longer than so; whether it
        is."""
        return self._beside.finish(within_s)

    def close(self) -> None:
        """Begin nothing more."""
        self._beside.close(LEAVE_S)

    def _write(self, copied: _Copy | _Move) -> None:
        """In the thread."""
        self._permit()
        if isinstance(copied, _Move):
            self._checkpoints.move(copied.cursor, copied.memory)
        else:
            self._checkpoints.save(
                copied.cursor,
                weights=copied.weights,
                state=copied.state.tensors,
                static=copied.static,
                together=self._together(copied),
                memory=copied.memory,
            )
        del copied
        self._tell()

    def _together(self, copied: _Copy) -> Together | None:
        if self._num_ranks == 1:
            return None
        return Together(num_ranks=self._num_ranks, token=copied.token, boxes=copied.state.boxes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Share:
    token: int
    shares: Shares


class ShareSaver:
    """Writes the shares of a rank that is not the first; what they are part of is complete when the
    first one says so."""

    def __init__(self, root: Path, *, rank: int, num_ranks: int) -> None:
        self._root = root
        self._rank = rank
        self._num_ranks = num_ranks
        self._beside = Beside("saver", self._write)

    def hand_over(self, token: int, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the state; it is written elsewhere."""
        self._beside.finish()
        self._beside.put(_Share(token=token, shares=copy_shares(state)))

    def refuse_if_failed(self) -> None:
        """Raise what went wrong in the thread: the first rank waits for a file that never comes."""
        self._beside.finish(within_s=0.0)

    def close(self) -> None:
        self._beside.close(LEAVE_S)

    def _write(self, share: _Share) -> None:
        """In the thread."""
        folder = self._root / partial_name(share.token)
        put_share(folder, self._rank, self._num_ranks, share.shares)
