# SPDX-License-Identifier: Apache-2.0
"""route: by-policy. A trainer sees the turns of its own policy."""

from __future__ import annotations

from penstock.dataflow.rules.rule import Rule
from penstock.types import Hook, PolicyName


class ByPolicy(Rule):
    """A policy's trainer sees the policy's own turns."""

    hook = Hook.ROUTE
    name = "by-policy"

    def sees(self, policy: PolicyName, turn_policy: PolicyName, role: str) -> bool:
        return turn_policy == policy


RULE = ByPolicy
