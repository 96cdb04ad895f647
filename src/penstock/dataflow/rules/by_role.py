# SPDX-License-Identifier: Apache-2.0
"""route: by-role. A trainer sees its own policy's turns in the roles declared for it; a policy
that is not declared sees all of its own."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from penstock.types import PolicyName


class ByRole:
    def __init__(
        self, state: MutableMapping[str, Any], *, roles: Mapping[str, Sequence[str]]
    ) -> None:
        self._roles = roles

    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        return turn_policy == policy and role in self._roles.get(policy, (role,))
