# SPDX-License-Identifier: Apache-2.0
"""curate: solved-filter. Tasks that nearly always succeed are tried again only now and then.

Success is a moving average of the mean reward, which should lie in [0, 1]; the first outcome
counts in full. A revisit that fails brings the task back."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from penstock.types import DropReason, JudgedGroup, RandomDraw, Task


class SolvedFilter:
    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        solved_at: float = 0.95,
        decay: float = 0.9,
        revisit: float = 0.05,
    ) -> None:
        self._tasks = state
        self._solved_at = solved_at
        self._decay = decay
        self._revisit = revisit

    def wants(self, task: Task, draw: RandomDraw) -> bool:
        known = self._tasks.get(task.key)
        if known is None or known["p"] < self._solved_at:
            return True
        return draw() < self._revisit

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        if not group.rows:
            return
        mean = sum(group.rewards) / len(group.rows)
        last = self._tasks.get(group.task_key, {"p": mean, "group": ""})
        if last["group"] == group.group_id:  # another policy's view of the same rollouts
            return
        p = self._decay * last["p"] + (1 - self._decay) * mean
        self._tasks[group.task_key] = {"p": p, "group": group.group_id}
