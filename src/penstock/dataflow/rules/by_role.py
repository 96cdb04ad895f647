# SPDX-License-Identifier: Apache-2.0
"""route: by-role. A trainer sees the turns of its own policy in certain roles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.options import non_empty
from penstock.types import Hook, PolicyName

Roles = Annotated[tuple[str, ...], Field(strict=False), non_empty()]


class ByRole(Rule):
    """A policy's trainer sees the policy's own turns in the given roles."""

    hook = Hook.ROUTE
    name = "by-role"

    roles: Annotated[Mapping[str, Roles], non_empty()]
    """Roles by policy; a policy without an entry sees all of its own turns."""

    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        return turn_policy == policy and role in self.roles.get(policy, (role,))


RULE = ByRole
