# SPDX-License-Identifier: Apache-2.0
"""Roles of the run file: which policy plays each part of a workflow.

Owns the shape of `roles` and its check against `models`. Which roles a workflow calls is known only
when it runs."""

from collections.abc import Iterable, Iterator, Mapping

from penstock.config.base import Name
from penstock.options import Contradiction
from penstock.plugins import unknown

Roles = Mapping[Name, Name]
"""Policy by role."""


def role_contradictions(roles: Roles, policies: Iterable[str]) -> Iterator[Contradiction]:
    """Roles of unknown policies, and roles that hide a policy: its own name is a role too."""
    known = tuple(policies)
    for role, policy in roles.items():
        if policy not in known:
            yield Contradiction(text=unknown("policy", policy, known), keys=(("roles", role),))
        elif role in known and role != policy:
            text = f"role {role} is also the name of a policy, and would call {policy} instead; "
            yield Contradiction(text=f"{text}rename the role", keys=(("roles", role),))
