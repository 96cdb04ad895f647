# SPDX-License-Identifier: Apache-2.0
"""curate: greso. Skips tasks whose last groups all earned one reward, before they are rolled out.

z counts such outcomes of a task in a row, easy or hard; max(floor, p^z) is its chance. p follows
their share once per version, after one pass over a source. Copies in flight raise z once."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from penstock.types import DropReason, JudgedGroup, RandomDraw, Task

SAME_REWARD, MAX_REJECTIONS = 1e-6, 256
NEW_TASK: dict[str, Any] = {"kind": "", "z": 0, "asked": True, "group": ""}


class Greso:
    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        p: float = 0.5,
        delta: float = 0.01,
        p_min: float = 0.01,
        p_max: float = 0.99,
        alpha_easy: float = 0.083,
        alpha_hard: float = 0.167,
        floor_easy: float = 0.05,
        floor_hard: float = 0.3,
        easy_from: float = 0.5,
        hard_to: float = 0.5,
    ) -> None:
        self._state = state
        self._start, self._delta, self._p_min, self._p_max = p, delta, p_min, p_max
        self._alpha = {"easy": alpha_easy, "hard": alpha_hard}
        self._floor = {"easy": floor_easy, "hard": floor_hard}
        self._easy_from, self._hard_to = easy_from, hard_to

    def wants(self, task: Task, draw: RandomDraw) -> bool:
        first = self._state.get(f"first of {task.source}")
        if first is None:
            self._state[f"first of {task.source}"] = [task.key, task.ordinal]
        elif first[0] == task.key and first[1] != task.ordinal and "armed" not in self._state:
            self._state["armed"] = True
        known = self._state.get(f"task {task.key}", NEW_TASK)
        rejections = self._state.get("rejections", 0)
        if known["z"] and rejections < MAX_REJECTIONS:
            p = self._state.get(f"p {known['kind']}", self._start)
            if draw() >= max(self._floor[known["kind"]], p ** known["z"]):
                self._state["rejections"] = rejections + 1
                return False
        if rejections:
            self._state["rejections"] = 0
        if not known["asked"]:
            self._state[f"task {task.key}"] = {**known, "asked": True}
        return True

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        known = self._state.get(f"task {group.task_key}", NEW_TASK)
        if not group.rows or known["group"] == group.group_id:
            return
        high = max(group.rewards)
        kind = "easy" if high >= self._easy_from else "hard" if high <= self._hard_to else ""
        kind = kind if high - min(group.rewards) <= SAME_REWARD else ""
        self._adapt(group, kind)
        z = known["z"] + known["asked"] if kind == known["kind"] else 1
        entry = {"kind": kind, "z": z if kind else 0, "asked": False, "group": group.group_id}
        self._state[f"task {group.task_key}"] = entry

    def _adapt(self, group: JudgedGroup, kind: str) -> None:
        new: dict[str, Any] = {"policy": group.policy, "number": group.number, "all": 0}
        count = self._state.get("count", new)
        if count["policy"] == group.policy and count["number"] != group.number:
            for side in ("easy", "hard") if "armed" in self._state else ():
                is_many = count.get(side, 0) / count["all"] >= self._alpha[side]
                p = self._state.get(f"p {side}", self._start) + self._delta * (1 - 2 * is_many)
                self._state[f"p {side}"] = min(self._p_max, max(self._p_min, p))
            count = new
        self._state["count"] = count | {key: count.get(key, 0) + 1 for key in ("all", kind) if key}
