# SPDX-License-Identifier: Apache-2.0
"""The positions of ranks: data-parallel parts, each of `cp` × `tp` ranks.

Owns the numbering: parts, then context-parallel ranks, then tensor-parallel ones, which talk most
and so have successive numbers. Ranks beyond are idle in this stage. Of several replicas, each has
successive parts.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.stages import ParallelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """One rank of a stage."""

    rank: int
    parallel: ParallelConfig

    @property
    def part(self) -> int:
        """Which part of each batch it computes."""
        return self.rank // self.parallel.ranks_per_part

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
        return self.rank % self.parallel.ranks_per_part == 0
