# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in the background: copied, written, then reported.

The trainer pays for one copy of its state and continues; a second copy is not made before the first
is on disk, so memory holds at most one. The ledger learns of a checkpoint only when it is complete.
An error here ends the trainer at its next call.

Every rank writes its shard of the state in the background, too, and its share of the weights unless
the published version has the same bits: then its file is linked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.trainer.background_worker import BackgroundWorker
from penstock.trainer.checkpoint import Checkpoints, Cursor
from penstock.trainer.durable_files import KnownFile, partial_name
from penstock.trainer.model_folders import WEIGHTS
from penstock.trainer.ranks.regions import Weights
from penstock.trainer.state_shards import StateShard, copy_shard, write_shard
from penstock.trainer.weight_shares import ShareBuffers, WeightShare, await_file, fill_file

Save = Callable[[], object]
"""Writes what was copied, which no later step changes."""


class Saver(BackgroundWorker[Save]):
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
        super().__init__("saver", self._write)

    def is_due(self, cursor: Cursor) -> bool:
        """Whether a checkpoint should be taken now; not before the last one is written."""
        return not self.is_busy and self._checkpoints.is_due(cursor)

    def submit(
        self,
        cursor: Cursor,
        *,
        weights: Weights | Future[KnownFile],
        state: Mapping[str, Tensor],
        static: Sequence[Path],
        monitor_state: Mapping[str, Any],
        token: int | None = None,
    ) -> None:
        """Copy this state once the previous copy is written; the rest happens in the background.

        weights: what rank 0 holds of them; or the file that will have them, which is linked.
        token: the one the other ranks were given for their shards of the state."""
        self.flush()
        save = partial(
            self._checkpoints.save,
            cursor,
            state=copy_shard(state),
            static=static,
            num_ranks=self._num_ranks,
            token=token,
            monitor_state=monitor_state,
        )
        if isinstance(weights, Future):
            self.put(lambda: save(weights=weights.result()))
        else:
            self.put(partial(save, weights=ShareBuffers().copy(weights)))

    def advance_cursor(self, cursor: Cursor, monitor_state: Mapping[str, Any]) -> None:
        """Save only a new cursor: the last state is also the state at this one."""
        self.flush()
        self.put(partial(self._checkpoints.advance_cursor, cursor, monitor_state))

    def _write(self, save: Save) -> None:
        """In the thread."""
        self._permit()
        save()
        del save
        self._tell()


class ShardSaver(BackgroundWorker[Save]):
    """Writes what ranks other than 0 hold; rank 0 decides when a checkpoint is complete."""

    def __init__(self, root: Path, *, rank: int, num_ranks: int) -> None:
        self._root = root
        self._rank = rank
        self._num_ranks = num_ranks
        super().__init__("saver", self._write)

    def submit(
        self,
        token: int,
        state: Mapping[str, Tensor],
        weights: Weights | None = None,
    ) -> None:
        """Copy this rank's shard of the state; it is written in the background. weights: what this
        rank holds of them, if the ranks write them, too."""
        self.flush()
        share = ShareBuffers().copy(weights or {}, is_rank0=False)
        self.put(partial(self._write_all, token, share, copy_shard(state)))

    def raise_if_failed(self) -> None:
        """Raise an error of the thread: rank 0 would wait for a file that never comes."""
        self.flush(timeout_s=0.0)

    def _write(self, write: Save) -> None:
        write()

    def _write_all(self, token: int, share: WeightShare, shard: StateShard) -> None:
        """In the thread. The receipt of the shard comes last, and is for both."""
        folder = self._root / partial_name(token)
        if share.tensors:
            if not await_file(folder / WEIGHTS, lambda: self.is_closed):
                return
            fill_file(folder / WEIGHTS, share)
        write_shard(folder, self._rank, self._num_ranks, shard)
