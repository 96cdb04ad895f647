# SPDX-License-Identifier: Apache-2.0
"""Turns of running attempts, kept for a retry.

In memory only (class D0): lost turns are generated again. A retry is offered the turns of the
longest earlier attempt at its slot; the second retry gets them without the last turn, which may
have caused the failure; the final one starts clean. Turns too old for the next batch are not
offered, nor turns of a credential that is no longer believed: the next holder of the slot would
deliver them in its own name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from penstock.dataflow.core.version_gate import VersionGate
from penstock.types import GroupId, OutcomeKind, RowId, RowSummary, Turn, versions_of
from penstock.wire.codec import encoded_bytes

MAX_BYTES = 256 << 20
DROP_LAST_TURN_FROM_ATTEMPT = 3
"""The attempt that is the second retry."""

Slot = tuple[GroupId, int]


@dataclass(slots=True)
class _Attempt:
    subject: str
    """Who reported it."""
    turns: list[Turn] = field(default_factory=list[Turn])


@dataclass(slots=True)
class _Recorded:
    """All attempts at one slot, by epoch."""

    attempts: dict[int, _Attempt] = field(default_factory=dict[int, _Attempt])
    num_bytes: int = 0


class Salvage:
    def __init__(
        self,
        gate: VersionGate,
        *,
        max_attempts: int,
        is_believed: Callable[[str], bool],
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """`is_believed`: whether turns of this subject may be passed on."""
        self._gate = gate
        self._is_believed = is_believed
        self._max_attempts = max_attempts
        self._max_bytes = max_bytes
        self._slots: OrderedDict[Slot, _Recorded] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._slots)

    def record(self, slot: Slot, epoch: int, index: int, turn: Turn, subject: str) -> bool:
        """Keep turn number `index` of an attempt of `subject`; False if it is already recorded, or
        follows a turn that was lost."""
        recorded = self._slots.setdefault(slot, _Recorded())
        turns = recorded.attempts.setdefault(epoch, _Attempt(subject)).turns
        if index != len(turns):
            return False
        turns.append(turn)
        size = encoded_bytes(turn)
        recorded.num_bytes += size
        self._num_bytes += size
        self._slots.move_to_end(slot)
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._slots)))
        return True

    def offer(self, slot: Slot, epoch: int, attempt: int) -> Sequence[Turn]:
        """Turns that the attempt with this lease may reuse, in recorded order."""
        recorded = self._slots.get(slot)
        if recorded is None or 1 < attempt == self._max_attempts:
            return ()
        earlier = [
            attempt.turns
            for known, attempt in recorded.attempts.items()
            if known < epoch and self._is_believed(attempt.subject)
        ]
        turns = max(earlier, key=len, default=list[Turn]())
        if attempt >= DROP_LAST_TURN_FROM_ATTEMPT:
            turns = turns[:-1]
        for index, turn in enumerate(turns):
            if not self._is_young(turn):
                return turns[:index]  # later ones continue it
        return turns

    def forget(self, slot: Slot) -> None:
        """The slot was delivered, or the attempt failed by its own fault."""
        recorded = self._slots.pop(slot, None)
        if recorded is not None:
            self._num_bytes -= recorded.num_bytes

    def retain(self, groups: Container[GroupId]) -> None:
        """Keep only these groups; the others have ended."""
        for slot in [slot for slot in self._slots if slot[0] not in groups]:
            self.forget(slot)

    def _is_young(self, turn: Turn) -> bool:
        versions = tuple(versions_of(turn))
        row = RowSummary(
            row_id=RowId(""),
            digest="",
            reward=None,
            outcome=OutcomeKind.COMPLETED,
            sampled={},
            versions={turn.policy: versions},
        )
        return self._gate.batches_left([row]) >= 0
