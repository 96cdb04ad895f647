# SPDX-License-Identifier: Apache-2.0
"""select: freshest. Youngest tokens first; the rest may expire, which is counted as waste."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import Candidate


class Freshest:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        return sorted(ready, key=lambda group: (-group.oldest, group.arrival))[:count]
