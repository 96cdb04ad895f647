# SPDX-License-Identifier: Apache-2.0
"""The positions of ranks: data-parallel parts, each of `tp` ranks.

Owns the numbering. Rank r of a stage with `dp` × `tp` is in part r // tp; ranks from dp × tp on are
idle in this stage. Imports no other module of penstock, and no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How a stage is sharded over ranks."""

    dp: int = 1
    """Parts that a batch is cut into."""
    tp: int = 1
    """Ranks that compute one part together."""

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    def part_of(self, rank: int) -> int | None:
        return rank // self.tp if rank < self.num_ranks else None

    def num_trainer_ranks(self, part: int) -> range:
        return range(part * self.tp, (part + 1) * self.tp)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """One rank of a stage."""

    rank: int
    parallel: Parallel

    @property
    def part(self) -> int:
        """Which part of each batch it computes."""
        return self.rank // self.parallel.tp

    @property
    def is_idle(self) -> bool:
        """It computes no part of the batch in this stage."""
        return self.rank >= self.parallel.num_ranks

    @property
    def is_rank0(self) -> bool:
        """The one rank that acts for the trainer: commits, publishes, writes."""
        return self.rank == 0

    @property
    def fetches_rows(self) -> bool:
        """The one rank of its part that fetches rows; the part's other ranks get them from it."""
        return self.rank % self.parallel.tp == 0
