# SPDX-License-Identifier: Apache-2.0
"""route: shared. A trainer sees the turns of every policy declared for it, such as a teacher's; a
policy that is not declared sees its own."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from penstock.types import PolicyName


class Shared:
    def __init__(
        self, state: MutableMapping[str, Any], *, turns_of: Mapping[str, Sequence[str]]
    ) -> None:
        self._turns_of = turns_of

    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        return turn_policy in self._turns_of.get(policy, (policy,))
