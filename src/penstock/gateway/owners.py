# SPDX-License-Identifier: Apache-2.0
"""What each owner of external sessions holds of what all share: places, recorded slots, memory.

Alone, an owner may have all slots, but never more than half of the places and of the memory.
Decides; opens and ends no session.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from penstock.errors import Busy

MAX_SESSIONS = 4096
"""Maximum number of open sessions. One owner never has more of them than are free, so that there
is always room for another owner: alone it gets half."""
MAX_KEPT_BYTES = 4 << 30
"""Of the turns of open and waiting sessions; shared in the same way."""
MAX_UNUSED, UNUSED_PER_S = 256, 1.0
"""Slots that an owner may give back without a result: each is written to the ledger, twice. Beyond
that its sessions are not recorded for a while."""
CLAIM_S = 600.0
"""An owner that asked for a slot so recently has a share of them."""


@dataclass(slots=True)
class _Held:
    sessions: int = 0
    slots: int = 0
    num_bytes: int = 0
    asked_at: float = -inf
    unused: float = 0.0
    """Slots given back; old ones count no more."""
    unused_at: float = -inf

    def num_unused(self, now: float) -> float:
        return max(0.0, self.unused - (now - self.unused_at) * UNUSED_PER_S) if self.unused else 0.0


class Owners:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._held: defaultdict[str, _Held] = defaultdict(_Held)
        self._all = _Held()

    @property
    def num_sessions(self) -> int:
        return self._all.sessions

    def check_place(self, owner: str) -> None:
        """Raise Busy if the owner may not open a session now."""
        own, num_free = self._held[owner].sessions, MAX_SESSIONS - self._all.sessions
        if own >= num_free:
            raise Busy(
                f"{own} sessions of yours are open or wait for a reward, and {num_free} of "
                f"{MAX_SESSIONS} places are free; end or reward some first",
                retry_after_s=1.0,
            )

    def check_memory(self, owner: str) -> None:
        """Raise Busy if the owner's sessions may not grow now."""
        own = self._held[owner].num_bytes
        if own > MAX_KEPT_BYTES - self._all.num_bytes:
            raise Busy(
                f"turns of your open and waiting sessions fill {own >> 20} MiB of the gateway's "
                f"{MAX_KEPT_BYTES >> 20}; end or reward some first",
                retry_after_s=1.0,
            )

    def may_record(self, owner: str, num_free: int) -> bool:
        """Whether the owner may take one of the free slots. Those who asked lately share all slots
        evenly: one that has more gets none until it has given back enough."""
        own, now = self._held[owner], self._clock()
        if own.num_unused(now) >= MAX_UNUSED:
            return False
        own.asked_at = now
        num_claims = sum(now - held.asked_at < CLAIM_S for held in self._held.values())
        return num_claims == 1 or own.slots * num_claims < self._all.slots + num_free

    def give_back(self, owner: str) -> None:
        """One of its slots, without a result."""
        own, now = self._held[owner], self._clock()
        own.unused, own.unused_at = own.num_unused(now) + 1, now

    def add(self, owner: str, *, sessions: int = 0, slots: int = 0, num_bytes: int = 0) -> None:
        """Negative for what it gives back."""
        for held in (self._held[owner], self._all):
            held.sessions += sessions
            held.slots += slots
            held.num_bytes += num_bytes
        own = self._held[owner]
        if not own.sessions and self._clock() - own.asked_at >= CLAIM_S:
            del self._held[owner]
