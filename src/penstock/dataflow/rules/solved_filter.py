# SPDX-License-Identifier: Apache-2.0
"""curate: solved-filter. Tasks that nearly always succeed are revisited only occasionally.

Success is a moving average of the mean reward, which should lie in [0, 1]; the first outcome
counts in full. Of several policies, the one with the lowest mean counts. A revisit that fails
brings the task back."""

from __future__ import annotations

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.types import DropReason, Hook, JudgedGroup, RandomDraw, Task


class SolvedFilter(Rule):
    """Revisit solved tasks only occasionally."""

    hook = Hook.CURATE
    name = "solved-filter"

    solved_at: float = Field(default=0.95, gt=0, le=1)
    """Moving average of the mean reward from which a task counts as solved."""
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of the average that remains after a judged group."""
    revisit: float = Field(default=0.05, gt=0, le=1)
    """Probability of a solved task; above 0, or a solved source would never give a task again."""

    def wants(self, task: Task, draw: RandomDraw) -> bool:
        known = self._state.get(task.key)
        if known is None or known["p"] < self.solved_at:
            return True
        return draw() < self.revisit

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        if not group.rows:
            return
        mean = sum(group.rewards) / len(group.rows)
        last = self._state.get(group.task_key, {"p": None, "group": ""})
        is_again = last["group"] == group.group_id  # another policy's view of the same rollouts
        before = last.get("before", last["p"]) if is_again else last["p"]
        p = mean if before is None else self.decay * before + (1 - self.decay) * mean
        if not is_again or p < last["p"]:
            entry = {"p": p, "group": group.group_id, "before": before}
            self._state[group.task_key] = entry


RULE = SolvedFilter
