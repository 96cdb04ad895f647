# SPDX-License-Identifier: Apache-2.0
"""route: by-policy. A trainer sees the turns that its own policy sampled."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from penstock.types import PolicyName


class ByPolicy:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        return turn_policy == policy
