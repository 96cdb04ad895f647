# SPDX-License-Identifier: Apache-2.0
"""The positions of ranks: data-parallel parts, each of `tp` ranks.

Owns the numbering. Rank r of a stage with `dp` × `tp` is in part r // tp; ranks from dp × tp on are
idle in this stage.
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
