# SPDX-License-Identifier: Apache-2.0
"""select: edf. Earliest deadline first: what expires next is trained next, so that a long answer
does not expire behind short ones."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import Candidate


class EarliestDeadline:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        return sorted(ready, key=lambda group: (group.oldest, group.arrival))[:count]
