# SPDX-License-Identifier: Apache-2.0
"""admit: outcome. Every member must have ended in one of the allowed ways."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import DropReason, JudgedGroup


class Outcomes:
    def __init__(
        self, state: MutableMapping[str, Any], *, allow: Sequence[str] = ("completed",)
    ) -> None:
        self._allow = frozenset(allow)

    def judge(self, group: JudgedGroup) -> DropReason | None:
        is_clean = all(row.outcome in self._allow for row in group.rows)
        return None if is_clean else DropReason.OUTCOME
