# SPDX-License-Identifier: Apache-2.0
"""curate: all. Rolls out every task."""

from __future__ import annotations

from penstock.dataflow.rules.rule import Rule
from penstock.types import Hook, RandomDraw, Task


class EveryTask(Rule):
    """Roll out every task."""

    hook = Hook.CURATE
    name = "all"

    def wants(self, task: Task, draw: RandomDraw) -> bool:
        return True


RULE = EveryTask
