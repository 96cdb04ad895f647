# SPDX-License-Identifier: Apache-2.0
"""One policy's reader of the ledger: what it asks for, what is ready for it, what is sealed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.dataflow import pacing
from penstock.dataflow.records import BatchRecord
from penstock.dataflow.rules import Admit, Select
from penstock.dataflow.versions import Lineage
from penstock.types import GroupId, PolicyName, RowSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTerms:
    """What a policy asks of the flow."""

    policy: PolicyName
    groups_per_batch: int
    max_staleness: int
    steps: int
    admit: tuple[tuple[str, Admit], ...]
    """Name and rule, in declared order; the first that drops a group decides."""
    select: tuple[str, Select]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadyGroup:
    group_id: GroupId
    task_key: str
    rows: tuple[RowSummary, ...]
    arrival: int
    tokens: int


@dataclass(slots=True)
class Consumer:
    """One policy's reader: its lineage, its ready groups, its sealed batches."""

    terms: PolicyTerms
    lineage: Lineage
    ready: dict[GroupId, ReadyGroup] = field(default_factory=dict[GroupId, ReadyGroup])
    sealed: dict[int, int] = field(default_factory=dict[int, int])
    """Groups by batch, of batches after the last committed one."""
    last_sealed: int = 0
    expected_yield: float = 1.0
    num_arrived: int = 0
    newest_batch: BatchRecord | None = None

    @property
    def next_number(self) -> int:
        """Version the next unsealed batch will train from, if all sealed before it are trained."""
        return self.lineage.number + max(0, self.last_sealed - self.lineage.seq)

    @property
    def is_done(self) -> bool:
        return self.lineage.number >= self.terms.steps

    def levels(self, num_open: int) -> pacing.Levels:
        return pacing.Levels(
            issued=num_open, admitted=len(self.ready), sealed=sum(self.sealed.values())
        )

    def oldest(self, rows: Sequence[RowSummary]) -> int:
        """Oldest version of this policy's tokens in the group, on the surviving lineage."""
        return min(map(self.number_of, rows))

    def number_of(self, row: RowSummary) -> int:
        return min(self.lineage.effective(*v) for v in row.versions[self.terms.policy])
