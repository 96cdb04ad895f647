# SPDX-License-Identifier: Apache-2.0
"""curate: greso. Skips tasks whose last groups had a uniform reward, before they are rolled out.

z counts such outcomes of a task in a row, separately for easy and hard; the task is submitted with
probability max(floor, p^z). p follows their share once per version, after one pass over a source.
Copies in flight raise z once. A uniform group is so in every role of every policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.options import Contradiction
from penstock.types import DropReason, Hook, JudgedGroup, RandomDraw, Task

SAME_REWARD, MAX_REJECTIONS = 1e-6, 256
NEW_TASK: dict[str, Any] = {"kind": "", "z": 0, "asked": True, "group": ""}

Share = Annotated[float, Field(gt=0, lt=1)]


class Greso(Rule):
    """Skip tasks that keep earning a uniform reward."""

    hook = Hook.CURATE
    name = "greso"

    p: Share = 0.5
    """Initial p."""
    delta: Share = 0.01
    """Change of p in one version."""
    p_min: Share = 0.01
    """Minimum of p."""
    p_max: Share = 0.99
    """Maximum of p."""
    alpha_easy: Share = 0.083
    """Share of uniform easy groups from which p of easy tasks falls."""
    alpha_hard: Share = 0.167
    """Share of uniform hard groups from which p of hard tasks falls."""
    floor_easy: float = Field(default=0.05, gt=0, le=1)
    """Minimum probability of an easy task."""
    floor_hard: float = Field(default=0.3, gt=0, le=1)
    """Minimum probability of a hard task."""
    easy_from: float = 0.5
    """Uniform reward from which a group is easy."""
    hard_to: float = 0.5
    """Uniform reward up to which a group that is not easy is hard."""

    def _contradictions(self) -> Iterator[Contradiction]:
        if not self.p_min <= self.p <= self.p_max:
            text = f"p {self.p} is not between p_min {self.p_min} and p_max {self.p_max}; "
            text += "set p_min <= p <= p_max"
            yield Contradiction(text=text, keys=(("p",), ("p_min",), ("p_max",)))
        if self.hard_to > self.easy_from:
            text = f"hard_to {self.hard_to} is above easy_from {self.easy_from}; "
            text += "set hard_to <= easy_from"
            yield Contradiction(text=text, keys=(("hard_to",), ("easy_from",)))

    def wants(self, task: Task, draw: RandomDraw) -> bool:
        first = self._state.get(f"first of {task.source}")
        if first is None:
            self._state[f"first of {task.source}"] = [task.key, task.ordinal]
        elif first[0] == task.key and first[1] != task.ordinal and "armed" not in self._state:
            self._state["armed"] = True
        known = self._state.get(f"task {task.key}", NEW_TASK)
        rejections = self._state.get("rejections", 0)
        if known["z"] and rejections < MAX_REJECTIONS:
            p = self._state.get(f"p {known['kind']}", self.p)
            if draw() >= max(self._floor(known["kind"]), p ** known["z"]):
                self._state["rejections"] = rejections + 1
                return False
        if rejections:
            self._state["rejections"] = 0
        if not known["asked"]:
            self._state[f"task {task.key}"] = {**known, "asked": True}
        return True

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        known = self._state.get(f"task {group.task_key}", NEW_TASK)
        if not group.rows:
            return
        kind = self._kind(group)
        if known["group"] == group.group_id:  # another policy's view of the same rollouts
            if kind != known["kind"]:
                self._state[f"task {group.task_key}"] = {**known, "kind": "", "z": 0}
            return
        self._adapt(group, kind)
        z = known["z"] + known["asked"] if kind == known["kind"] else 1
        entry = {"kind": kind, "z": z if kind else 0, "asked": False, "group": group.group_id}
        self._state[f"task {group.task_key}"] = entry

    def _kind(self, group: JudgedGroup) -> str:
        """`easy` or `hard` if every role's reward is uniform; empty for any other group."""
        if any(max(r) - min(r) > SAME_REWARD for r in group.role_rewards.values()):
            return ""
        high = max(group.rewards)
        return "easy" if high >= self.easy_from else "hard" if high <= self.hard_to else ""

    def _adapt(self, group: JudgedGroup, kind: str) -> None:
        new: dict[str, Any] = {"policy": group.policy, "number": group.number, "all": 0}
        count = self._state.get("count", new)
        if count["policy"] == group.policy and count["number"] != group.number:
            for side in ("easy", "hard") if "armed" in self._state else ():
                is_many = count.get(side, 0) / count["all"] >= self._alpha(side)
                p = self._state.get(f"p {side}", self.p) + self.delta * (1 - 2 * is_many)
                self._state[f"p {side}"] = min(self.p_max, max(self.p_min, p))
            count = new
        self._state["count"] = count | {key: count.get(key, 0) + 1 for key in ("all", kind) if key}

    def _alpha(self, kind: str) -> float:
        return self.alpha_easy if kind == "easy" else self.alpha_hard

    def _floor(self, kind: str) -> float:
        return self.floor_easy if kind == "easy" else self.floor_hard


RULE = Greso
