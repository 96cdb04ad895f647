# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in the background: copied, written, then reported.

The trainer pays for one copy of its state and continues; a second copy is not made before the first
is on disk, so memory holds at most one. The ledger learns of a checkpoint only when it is complete.
An error here ends the trainer at its next call.

Every rank writes its shard of the state in the background, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.trainer.background_worker import BackgroundWorker
from penstock.trainer.checkpoint import Checkpoints, Cursor, ShardedSave
from penstock.trainer.durable_files import partial_name
from penstock.trainer.state_shards import StateShard, copy_shard, write_shard

CLOSE_TIMEOUT_S = 5.0
"""A trainer that fails for another reason waits no longer than this for the current checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _FullSave:
    """The state at one cursor, which no later step changes."""

    cursor: Cursor
    weights: Mapping[str, Tensor]
    state: StateShard
    static: Sequence[Path]
    token: int
    monitor_state: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _CursorSave:
    """Only the cursor has changed."""

    cursor: Cursor
    monitor_state: Mapping[str, Any]


class Saver:
    """Writes the checkpoints of one trainer; with several ranks, on rank 0.

    `check_allowed` raises if this trainer may no longer write, and `on_saved` reports the retained
    checkpoints to the ledger; both are called in the thread, before and after each write."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        *,
        check_allowed: Callable[[], None],
        on_saved: Callable[[], None],
        num_ranks: int = 1,
    ) -> None:
        self._checkpoints = checkpoints
        self._permit = check_allowed
        self._tell = on_saved
        self._num_ranks = num_ranks
        self._worker = BackgroundWorker("saver", self._write)

    def is_due(self, cursor: Cursor) -> bool:
        """Whether a checkpoint should be taken now; not before the last one is written."""
        return not self._worker.is_busy and self._checkpoints.is_due(cursor)

    def submit(
        self,
        cursor: Cursor,
        *,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        static: Sequence[Path],
        monitor_state: Mapping[str, Any],
        token: int = 0,
    ) -> None:
        """Copy this state once the previous copy is written; the rest happens in the background.

        token: the one the other ranks were given for their shards of the state."""
        self.flush()
        copied = _FullSave(
            cursor=cursor,
            weights={name: value.detach().clone() for name, value in weights.items()},
            state=copy_shard(state),
            static=static,
            token=token,
            monitor_state=monitor_state,
        )
        self._worker.put(copied)

    def advance_cursor(self, cursor: Cursor, monitor_state: Mapping[str, Any]) -> None:
        """Save only a new cursor: the last state is also the state at this one."""
        self.flush()
        self._worker.put(_CursorSave(cursor=cursor, monitor_state=monitor_state))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait for all submitted work, at most `timeout_s`; return whether it is complete and
        reported."""
        return self._worker.flush(timeout_s)

    def close(self) -> None:
        """Start no further work."""
        self._worker.close(CLOSE_TIMEOUT_S)

    def _write(self, copied: _FullSave | _CursorSave) -> None:
        """In the thread."""
        self._permit()
        if isinstance(copied, _CursorSave):
            self._checkpoints.advance_cursor(copied.cursor, copied.monitor_state)
        else:
            self._checkpoints.save(
                copied.cursor,
                weights=copied.weights,
                state=copied.state.tensors,
                static=copied.static,
                sharded=self._sharded(copied),
                monitor_state=copied.monitor_state,
            )
        del copied
        self._tell()

    def _sharded(self, copied: _FullSave) -> ShardedSave | None:
        if self._num_ranks == 1:
            return None
        return ShardedSave(
            num_ranks=self._num_ranks, token=copied.token, regions=copied.state.regions
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShardSave:
    token: int
    shares: StateShard


class ShardSaver:
    """Writes the shards of ranks other than 0; rank 0 decides when a checkpoint is complete."""

    def __init__(self, root: Path, *, rank: int, num_ranks: int) -> None:
        self._root = root
        self._rank = rank
        self._num_ranks = num_ranks
        self._worker = BackgroundWorker("saver", self._write)

    def submit(self, token: int, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's shard of the state; it is written in the background."""
        self._worker.flush()
        self._worker.put(_ShardSave(token=token, shares=copy_shard(state)))

    def raise_if_failed(self) -> None:
        """Raise an error of the thread: rank 0 would wait for a file that never comes."""
        self._worker.flush(timeout_s=0.0)

    def close(self) -> None:
        self._worker.close(CLOSE_TIMEOUT_S)

    def _write(self, share: _ShardSave) -> None:
        """In the thread."""
        folder = self._root / partial_name(share.token)
        write_shard(folder, self._rank, self._num_ranks, share.shares)
