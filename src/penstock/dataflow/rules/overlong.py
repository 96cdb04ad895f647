# SPDX-License-Identifier: Apache-2.0
"""admit: overlong. Refuses groups with too many truncated answers."""

from __future__ import annotations

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.types import DropReason, Hook, JudgedGroup, OutcomeKind


class Overlong(Rule):
    """Refuse groups with too many truncated answers."""

    hook = Hook.ADMIT
    name = "overlong"

    max_share: float = Field(default=0.5, ge=0, lt=1)
    """Largest share of truncated members."""

    def judge(self, group: JudgedGroup) -> DropReason | None:
        num_truncated = sum(row.outcome is OutcomeKind.TRUNCATED for row in group.rows)
        is_within = num_truncated <= self.max_share * len(group.rows)
        return None if is_within else DropReason.OVERLONG


RULE = Overlong
