# SPDX-License-Identifier: Apache-2.0
"""admit: overlong. Refuses groups of which too many answers were cut at a limit."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from penstock.types import DropReason, JudgedGroup, OutcomeKind


class Overlong:
    def __init__(self, state: MutableMapping[str, Any], *, max_share: float = 0.5) -> None:
        self._max_share = max_share

    def judge(self, group: JudgedGroup) -> DropReason | None:
        num_truncated = sum(row.outcome is OutcomeKind.TRUNCATED for row in group.rows)
        is_within = num_truncated <= self._max_share * len(group.rows)
        return None if is_within else DropReason.OVERLONG
