# SPDX-License-Identifier: Apache-2.0
"""admit: dedup. Refuses a task that is among the last `window` admitted ones.

Keeps them in a ring of as many keys, so the memory is bounded."""

from __future__ import annotations

from typing import Any

from pydantic import PositiveInt, PrivateAttr

from penstock.dataflow.rules.rule import Rule
from penstock.types import DropReason, Hook, JudgedGroup


class Dedup(Rule):
    """Refuse recently admitted tasks."""

    hook = Hook.ADMIT
    name = "dedup"

    window: PositiveInt = 1000
    """Number of admitted groups to remember."""

    _last: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])
    """The ring by task: an index over the state, with nothing that the state does not have."""

    def _load_state(self) -> None:
        ring = [entry for key, entry in self._state.items() if key.startswith("at ")]
        ring.sort(key=lambda entry: entry["number"])
        self._last = {entry["task"]: entry for entry in ring}

    def judge(self, group: JudgedGroup) -> DropReason | None:
        last = self._last.get(group.task_key)
        if last is None or last["group"] == group.group_id:
            return None
        is_recent = last["number"] >= self._state["next"] - self.window
        return DropReason.DUPLICATE if is_recent else None

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        if verdict is not None:
            return
        number = self._state.get("next", 0)
        key = f"at {number % self.window}"
        if key in self._state:
            self._last.pop(self._state[key]["task"], None)
        entry = {"task": group.task_key, "group": group.group_id, "number": number}
        self._state["next"] = number + 1
        self._state[key] = self._last[group.task_key] = entry


RULE = Dedup
