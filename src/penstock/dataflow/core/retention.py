# SPDX-License-Identifier: Apache-2.0
"""Decides whose payload may be deleted: a pure count of the holds on each group.

A group is held once by each consumer that has not judged it, once by each sealed batch that a
trainer may still request, and once by each replay pool that contains it. The call that ends its
last hold returns it, exactly once; the caller records that in the same commit as the cause. Deletes
nothing itself.

Batches after a policy's oldest retained checkpoint may be requested again. Until the trainer names
one, the last `retain_batches` committed batches are kept; batches that are not committed yet are
always kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.types import GroupId, PolicyName


@dataclass(slots=True)
class _ConsumerHolds:
    """One consumer's holds on the groups it has judged."""

    batches: dict[int, tuple[GroupId, ...]] = field(default_factory=dict[int, tuple[GroupId, ...]])
    """Groups of each batch that may be requested again, in order of seq."""
    pool: set[GroupId] = field(default_factory=set[GroupId])
    committed: int = 0
    oldest: int | None = None
    """Seq of the oldest retained checkpoint; None until the trainer names one."""
    floor: int = 0
    """Batches up to this seq are released; never moves back, since freed groups stay freed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedBatches:
    """Batches that a service kept for one consumer before it was restarted."""

    floor: int
    """The newest batch with a freed group; all batches up to it are released."""
    batches: Mapping[int, tuple[GroupId, ...]]
    """Groups by the last batch that contains them, for batches after the floor, in order of seq."""


class Retention:
    """Counts holds per group. A single hold is not stored as a count, so a retained group of one
    policy costs only its id and one reference."""

    def __init__(self, consumers: Iterable[PolicyName], *, retain_batches: int) -> None:
        self._retain_batches = retain_batches
        self._holds = {consumer: _ConsumerHolds() for consumer in consumers}
        self._extra_holds: dict[GroupId, int] = {}
        """Holds beyond the first, for groups with several."""

    # --- events; each call returns the groups that became free ---------------------------------

    def issued(self, group_id: GroupId, num_consumers: int) -> None:
        """`num_consumers` consumers will judge it."""
        if num_consumers > 1:
            self._extra_holds[group_id] = num_consumers - 1

    def dropped(self, group_id: GroupId) -> list[GroupId]:
        """One consumer will never train on it."""
        return self._release((group_id,))

    def sealed(self, consumer: PolicyName, seq: int, group_ids: Sequence[GroupId]) -> None:
        """The consumer's hold passes to its batch, or to the next instalment of it; a group from
        its pool gets an additional hold. Call this before `unpooled`, or the group looks as if it
        had never been judged."""
        pins = self._holds[consumer]
        assert seq >= next(reversed(pins.batches), 0), "batches are sealed in order"
        for group_id in group_ids:
            if group_id in pins.pool:
                self._hold(group_id)
        pins.batches[seq] = (*pins.batches.get(seq, ()), *group_ids)

    def pooled(self, group_id: GroupId, consumer: PolicyName) -> None:
        """Replay may use it again."""
        pool = self._holds[consumer].pool
        if group_id not in pool:
            pool.add(group_id)
            self._hold(group_id)

    def unpooled(self, group_id: GroupId, consumer: PolicyName) -> list[GroupId]:
        pool = self._holds[consumer].pool
        if group_id not in pool:
            return []
        pool.remove(group_id)
        return self._release((group_id,))

    def committed(self, consumer: PolicyName, seq: int) -> list[GroupId]:
        """The committed cursor moved: forward by a commit, or back by a fork."""
        self._holds[consumer].committed = seq
        return self._advance(consumer)

    def retained(self, consumer: PolicyName, oldest_seq: int | None) -> list[GroupId]:
        """The trainer's oldest retained checkpoint; None while it has none."""
        self._holds[consumer].oldest = oldest_seq
        return self._advance(consumer)

    def oldest_servable(self, consumer: PolicyName) -> int:
        """The oldest seq that a trainer may fork from: every batch after it can be served."""
        return self._holds[consumer].floor

    # --- holds --------------------------------------------------------------------------------

    def _advance(self, consumer: PolicyName) -> list[GroupId]:
        pins = self._holds[consumer]
        floor = pins.committed - self._retain_batches if pins.oldest is None else pins.oldest
        # A checkpoint ahead of the cursor must not free batches that are not trained yet.
        floor = min(floor, pins.committed)
        if floor <= pins.floor:
            return []
        pins.floor = floor
        freed: list[GroupId] = []
        for seq in [seq for seq in pins.batches if seq <= floor]:
            freed += self._release(pins.batches.pop(seq))
        return freed

    def _hold(self, group_id: GroupId) -> None:
        self._extra_holds[group_id] = self._extra_holds.get(group_id, 0) + 1

    def _release(self, group_ids: Iterable[GroupId]) -> list[GroupId]:
        freed: list[GroupId] = []
        for group_id in group_ids:
            more = self._extra_holds.get(group_id, 0)
            if more > 1:
                self._extra_holds[group_id] = more - 1
            elif more == 1:
                del self._extra_holds[group_id]
            else:
                freed.append(group_id)
        return freed

    # --- restart ------------------------------------------------------------------------------

    def restore(
        self,
        *,
        undecided: Iterable[GroupId],
        batches: Mapping[PolicyName, RetainedBatches],
        pools: Mapping[PolicyName, Iterable[GroupId]],
        cursors: Mapping[PolicyName, tuple[int, int | None]],
    ) -> list[GroupId]:
        """undecided: a group once per consumer that has not judged it · batches: batches not
        released before the restart · cursors: committed seq and oldest retained checkpoint. Returns
        the groups that the current settings free and the previous ones did not."""
        holds = Counter(undecided)
        for consumer, pins in self._holds.items():
            pins.batches, pins.floor = dict(batches[consumer].batches), batches[consumer].floor
            pins.pool = set(pools.get(consumer, ()))
            pins.committed, pins.oldest = cursors[consumer]
            holds.update(group_id for batch in pins.batches.values() for group_id in batch)
            holds.update(pins.pool)
        self._extra_holds = {group_id: n - 1 for group_id, n in holds.items() if n > 1}
        freed: list[GroupId] = []
        for consumer in self._holds:
            freed += self._advance(consumer)
        return freed
