# SPDX-License-Identifier: Apache-2.0
"""Moves rows from the ranks of one stage to the ranks of the next.

Owns who sends what to whom, and the exchange: lengths first, then bytes, all to all. Rows that a
rank already has are not sent; if no rank misses any, nothing is sent at all. No row passes through
a rank that neither had nor needs it. A row is opaque bytes here.

R = rows of a batch, in manifest order, W = ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from penstock.config.stages import ParallelConfig
from penstock.trainer.arrays import Ints
from penstock.trainer.ranks.topology import RankPosition

RowBytes = dict[int, bytes]
"""By index in the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlacement:
    """Which rows the ranks of a stage hold."""

    parallel: ParallelConfig
    parts_R: Ints
    """The part each row belongs to."""

    def rows_of(self, rank: int) -> list[int]:
        at = RankPosition(rank=rank, parallel=self.parallel)
        return [] if at.is_idle else np.flatnonzero(self.parts_R == at.part).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTransfer:
    row: int
    source: int
    target: int


def plan_transfers(before: RowPlacement, after: RowPlacement) -> list[RowTransfer]:
    """One move for each row that a rank of the next stage lacks, by target and row.

    Of several ranks that hold a row, the one with the fewest to send so far sends it.
    """
    assert before.parts_R.size == after.parts_R.size, "both stages have the same batch"
    each = before.parallel.ranks_per_part
    num_sent = [0] * before.parallel.num_ranks
    moves: list[RowTransfer] = []
    for target in range(after.parallel.num_ranks):
        held = set(before.rows_of(target))
        for row in after.rows_of(target):
            if row in held:
                continue
            first = int(before.parts_R[row]) * each
            source = min(range(first, first + each), key=num_sent.__getitem__)
            num_sent[source] += 1
            moves.append(RowTransfer(row=row, source=source, target=target))
    return moves


def repartition(
    rows: Mapping[int, bytes], before: RowPlacement, after: RowPlacement, *, rank: int
) -> RowBytes:
    """This rank's rows in the next stage. Every rank calls it with the same plan."""
    moves = plan_transfers(before, after)
    found = dict(rows)
    if moves:
        outgoing = [move for move in moves if move.source == rank]
        incoming = [move for move in moves if move.target == rank]
        found |= _exchange(rows, outgoing, incoming)
    return {row: found[row] for row in after.rows_of(rank)}


def _exchange(
    rows: Mapping[int, bytes], outgoing: Sequence[RowTransfer], incoming: Sequence[RowTransfer]
) -> RowBytes:
    num_ranks = dist.get_world_size()
    outgoing = sorted(outgoing, key=lambda move: (move.target, move.row))
    incoming = sorted(incoming, key=lambda move: (move.source, move.row))
    targets_W = _counts([move.target for move in outgoing], num_ranks)
    sources_W = _counts([move.source for move in incoming], num_ranks)
    lengths = torch.tensor([len(rows[move.row]) for move in outgoing], dtype=torch.int64)
    coming = torch.empty(len(incoming), dtype=torch.int64)
    dist.all_to_all_single(coming, lengths, sources_W, targets_W)
    sent = _as_bytes(b"".join(rows[move.row] for move in outgoing))
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    dist.all_to_all_single(received, sent, _sums(coming, sources_W), _sums(lengths, targets_W))
    payload = received.numpy()
    ends = coming.cumsum(0)
    starts = ends - coming
    return {
        move.row: payload[start:end].tobytes()
        for move, start, end in zip(incoming, starts.tolist(), ends.tolist(), strict=True)
    }


def _as_bytes(payload: bytes) -> Tensor:
    if not payload:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _counts(ranks: Sequence[int], num_ranks: int) -> list[int]:
    return np.bincount(np.array(ranks, np.int64), minlength=num_ranks).tolist()


def _sums(lengths: Tensor, counts: Sequence[int]) -> list[int]:
    return [int(part.sum()) for part in lengths.split(list(counts))]
