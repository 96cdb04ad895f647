# SPDX-License-Identifier: Apache-2.0
"""A task module whose tasks can be changed from a place on."""

from __future__ import annotations

changed_from: int | None = None
num_tasks = 1_000_000


def make_task(ordinal: int, seed: int) -> dict[str, str]:
    if ordinal >= num_tasks:
        raise IndexError(ordinal)
    is_changed = changed_from is not None and ordinal >= changed_from
    return {"prompt": f"{ordinal}{'!' if is_changed else ''}"}
