# SPDX-License-Identifier: Apache-2.0
"""Rules as a user writes them: one that fits, and several that do not."""

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import Candidate, DropReason, JudgedGroup, PolicyName, RandomDraw


class OnlyLong:
    """Fits the hook admit."""

    def __init__(self, state: MutableMapping[str, Any], *, min_rows: int = 2, unit: str) -> None:
        if min_rows < 0:
            raise ValueError("min_rows must not be negative")
        self.min_rows, self.unit = min_rows, unit

    def judge(self, group: JudgedGroup) -> DropReason | None:
        return None if len(group.rows) >= self.min_rows else DropReason.RULE


class AnyOptions:
    def __init__(self, state: MutableMapping[str, Any], **options: Any) -> None:
        self.options = options

    def judge(self, group: JudgedGroup) -> DropReason | None:
        return None


class NoState:
    def judge(self, group: JudgedGroup) -> DropReason | None:
        return None


class WrongArguments:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def judge(self, group: JudgedGroup, clock: float) -> DropReason | None:
        return None


class Again:
    """A replay rule whose bounds are as given."""

    def __init__(self, state: MutableMapping[str, Any], **bounds: Any) -> None:
        self.ratio = bounds.get("ratio", 0.5)
        self.max_uses = bounds.get("max_uses", 2)
        self.max_staleness = bounds.get("max_staleness")

    def choose(
        self, pool: Sequence[Candidate], count: int, draw: RandomDraw
    ) -> Sequence[Candidate]:
        return pool[:count]


class BlindRoute:
    """Cannot say who sees what."""

    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        raise RuntimeError(f"no idea about {turn_policy} as {role!r}")
