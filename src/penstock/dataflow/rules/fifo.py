# SPDX-License-Identifier: Apache-2.0
"""select: fifo. In the order of admission."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

from penstock.types import Candidate


class Fifo:
    def __init__(self, state: MutableMapping[str, Any]) -> None:
        pass

    def choose(self, ready: Sequence[Candidate], count: int) -> Sequence[Candidate]:
        return sorted(ready, key=lambda group: group.arrival)[:count]
