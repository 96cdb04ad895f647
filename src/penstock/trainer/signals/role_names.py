# SPDX-License-Identifier: Apache-2.0
"""Which roles the statistics of a run name: the roles of the run file, and the first others.

Owns that bound: nodes name roles, and a tracker keeps a curve of each name for good. Pure; what was
named is part of the checkpoint, so that a batch that is trained again has the same statistics.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.bounds import MAX_SHOWN_ROLES, OTHER_ROLES

TOKENS = "tokens/role/"
_OF_A_ROLE = re.compile(r"(?:[^/]+/)?(?:reward|tokens)/role/(.*)", re.DOTALL)
"""Of the actor, or of another model: `critic/reward/role/solver`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNames:
    """Of one policy."""

    found: tuple[str, ...] = ()
    """Roles that the run file does not name, at most MAX_SHOWN_ROLES."""

    def updated(self, stats: Mapping[str, float], known: Collection[str]) -> RoleNames:
        """With the roles of this batch, as far as there is room: most tokens first.

        known: roles of the run file."""
        tokens = {
            name.removeprefix(TOKENS): n for name, n in stats.items() if name.startswith(TOKENS)
        }
        new = tokens.keys() - {OTHER_ROLES, *known, *self.found}
        ranked = sorted(new, key=lambda role: (-tokens[role], role))
        return RoleNames(found=(*self.found, *ranked)[:MAX_SHOWN_ROLES])

    def of_run(self, stats: Mapping[str, float], known: Collection[str]) -> dict[str, float]:
        """These statistics, without roles beyond the bound."""
        named = {OTHER_ROLES, *known, *self.found}
        return {
            name: value
            for name, value in stats.items()
            if (role := _OF_A_ROLE.fullmatch(name)) is None or role[1] in named
        }
