# SPDX-License-Identifier: Apache-2.0
"""admit: all. Every closed group may enter."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from penstock.types import DropReason, JudgedGroup


class EveryGroup:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def judge(self, group: JudgedGroup) -> DropReason | None:
        return None
