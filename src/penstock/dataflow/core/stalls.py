# SPDX-License-Identifier: Apache-2.0
"""When a run is stalled, and who waits for whom in it. Pure.

Owns the two judgements: `StallClock` says that nothing has advanced for too long, and `find_chain`
names the party that has to act. Stops and restarts nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from penstock.dataflow.core.leasing import Activity

LONGEST_FACTOR = 3.0
"""How many times its longest pause so far a run may pause."""
START_S = 600.0
"""The least time for a process that has just started to show its first progress: it imports torch
and loads a model."""
MAX_GAP_S = 5.0
"""A longer gap between two observations is not counted in full: the observer was suspended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One wait of a chain: who waits, and for whom."""

    who: str
    on: str
    """The party that has to act."""
    item: str
    """What the wait is about: a batch, a row, a version."""
    since_s: float
    service: str = ""
    """The process to look at; empty if there is none."""

    def __str__(self) -> str:
        item = f" ({self.item})" if self.item else ""
        return f"{self.who} waits for {self.on}{item}, for {self.since_s:.0f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWait:
    """What the trainer of one policy does."""

    policy: str
    seq: int
    """The batch that it trains or waits for."""
    is_waiting: bool
    """It waits for that batch."""
    has_batch: bool
    """A batch is sealed for it."""
    since_s: float

    @property
    def service(self) -> str:
        return f"trainer-{self.policy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWait:
    """What one node does."""

    node_id: str
    num_leases: int
    silent_s: float
    """Since its last heartbeat; 0 unless it has missed several."""
    work: tuple[Activity, ...]
    is_untrusted: bool = False
    """What it says of itself shifts no blame."""

    @property
    def service(self) -> str:
        """Its process, if that may be one of this run's launcher."""
        return "" if self.is_untrusted else self.node_id

    @property
    def since_s(self) -> float:
        """How long it has been waiting or silent."""
        return max([self.silent_s, *(activity.since_s for activity in self.work)])


def find_chain(
    trainer: TrainerWait, nodes: Sequence[NodeWait], *, blocker: str
) -> tuple[Link, ...]:
    """From a trainer to the party that has to act next. `blocker`: why no work is issued, for a run
    whose nodes are all idle."""
    batch = f"batch {trainer.seq}"
    if not trainer.is_waiting:
        item = batch if trainer.has_batch else "its start"
        return (_link("dataflow", trainer.service, item, trainer.since_s, trainer.service),)
    first = _link(trainer.service, batch, "", trainer.since_s, trainer.service)
    busy = [node for node in nodes if node.num_leases] or list(nodes)
    if not busy:
        return first, _link(batch, "a rollout node", "none has joined", trainer.since_s, "")
    node = max([one for one in busy if not one.is_untrusted] or busy, key=attrgetter("since_s"))
    rows = f"{node.num_leases} row{'' if node.num_leases == 1 else 's'}"
    held = _link(batch, node.node_id, rows, trainer.since_s, node.service)
    if node.silent_s:
        return first, held, _silent(node)
    if node.work:
        found = node.work[0]
        waits = _link(node.node_id, found.what, found.item, found.since_s, node.service)
        return first, held, waits
    if node.num_leases:
        return first, held
    return first, _link(batch, blocker, "", trainer.since_s, "")


def _link(who: str, on: str, item: str, since_s: float, service: str) -> Link:
    return Link(who=who, on=on, item=item, since_s=round(since_s, 1), service=service)


def _silent(node: NodeWait) -> Link:
    return _link(node.node_id, "its process", "no heartbeat", node.silent_s, node.service)


@dataclass(slots=True)
class StallClock:
    """How long a run has been without progress, by what an observer sees of it at intervals."""

    limit_s: float
    idle_s: float = 0.0
    """Since the last sign of progress."""
    longest_s: float = 0.0
    """The longest time between two signs of progress so far."""
    is_starting: bool = True
    """A process has started, and no result has come since."""
    has_acted: bool = False
    """A stall was reported, and no result has come since."""
    _at: float | None = None
    _seen: tuple[Hashable, Hashable, int | None] | None = None

    def observe(
        self, now: float, *, started: Hashable, moved: Hashable, num_results: int | None
    ) -> None:
        """What is seen now; a change is a sign of progress.

        started: the processes. moved: all that advances, also within a step or an attempt.
        num_results: trajectories, steps and the like; a process that starts again and again brings
        none. None: not known yet."""
        self.idle_s += 0.0 if self._at is None else min(now - self._at, MAX_GAP_S)
        self._at = now
        before, self._seen = self._seen, (started, moved, num_results)
        if before is None or before == self._seen:
            return
        if not self.is_starting and not self.has_acted:
            self.longest_s = max(self.longest_s, self.idle_s)
        if before[2] is not None and num_results is not None and num_results > before[2]:
            self.is_starting = self.has_acted = False
        if before[0] != started:
            self.is_starting = True
        self.idle_s = 0.0

    @property
    def patience_s(self) -> float:
        """How long it may be without progress."""
        least_s = START_S if self.is_starting else 0.0
        return max(self.limit_s, least_s, LONGEST_FACTOR * self.longest_s)

    @property
    def is_stalled(self) -> bool:
        return self.idle_s >= self.patience_s

    def begin_again(self) -> None:
        """A stall was reported; count from here."""
        self.idle_s, self.has_acted = 0.0, True
