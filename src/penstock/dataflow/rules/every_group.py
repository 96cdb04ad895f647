# SPDX-License-Identifier: Apache-2.0
"""admit: all. Admits every closed group."""

from __future__ import annotations

from penstock.dataflow.rules.rule import Rule
from penstock.types import DropReason, Hook, JudgedGroup


class EveryGroup(Rule):
    """Admit every group."""

    hook = Hook.ADMIT
    name = "all"

    def judge(self, group: JudgedGroup) -> DropReason | None:
        return None


RULE = EveryGroup
