# SPDX-License-Identifier: Apache-2.0
"""route: shared. A trainer also sees turns of other policies, such as a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from penstock.dataflow.rules.rule import Rule
from penstock.options import non_empty
from penstock.types import Hook, PolicyName

Policies = Annotated[tuple[str, ...], Field(strict=False), non_empty()]


class Shared(Rule):
    """A policy's trainer sees the turns of the given policies."""

    hook = Hook.ROUTE
    name = "shared"

    turns_of: Annotated[Mapping[str, Policies], non_empty()]
    """Sampling policies by trained policy; a policy without an entry sees its own turns."""

    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        return turn_policy in self.turns_of.get(policy, (policy,))


RULE = Shared
