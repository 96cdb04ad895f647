# SPDX-License-Identifier: Apache-2.0
"""curate: all. Every task is worth rolling out."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from penstock.types import RandomDraw, Task


class EveryTask:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def wants(self, task: Task, draw: RandomDraw) -> bool:
        return True
