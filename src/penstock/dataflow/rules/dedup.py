# SPDX-License-Identifier: Apache-2.0
"""admit: dedup. Refuses a task that is among the last `window` ones admitted.

Remembers them in a ring of as many keys, so it forgets on its own."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from penstock.types import DropReason, JudgedGroup


class Dedup:
    def __init__(self, state: MutableMapping[str, Any], *, window: int = 1000) -> None:
        self._state = state
        self._window = window
        ring = [entry for key, entry in state.items() if key.startswith("at ")]
        ring.sort(key=lambda entry: entry["number"])
        self._last = {entry["task"]: entry for entry in ring}
        """The ring by task, as an index of it: nothing that the state does not hold."""

    def judge(self, group: JudgedGroup) -> DropReason | None:
        last = self._last.get(group.task_key)
        if last is None or last["group"] == group.group_id:
            return None
        is_recent = last["number"] >= self._state["next"] - self._window
        return DropReason.DUPLICATE if is_recent else None

    def learn(self, group: JudgedGroup, verdict: DropReason | None) -> None:
        if verdict is not None:
            return
        number = self._state.get("next", 0)
        key = f"at {number % self._window}"
        if key in self._state:
            self._last.pop(self._state[key]["task"], None)
        entry = {"task": group.task_key, "group": group.group_id, "number": number}
        self._state["next"] = number + 1
        self._state[key] = self._last[group.task_key] = entry
