# SPDX-License-Identifier: Apache-2.0
"""The real core of the dataflow under virtual time: nodes that take so many seconds per answer,
trainers that take so many per batch. An hour of a run costs seconds.

Home, partition, rules, pacing and sealing are the service's own. What the core writes is counted,
not stored. Nodes and trainers are as simple as can be; what they do is decided by the caller."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.leasing import Grant, LiveVersion, NodeState, RegisterRequest
from penstock.dataflow.core.messages import IncarnationStarted, Published
from penstock.dataflow.ledger.assemble import CoreSpec, build_coordinator_core
from penstock.dataflow.ledger.tables import open_memory_tables
from penstock.dataflow.records import Deletion, FateRecord, LeaseRecord, Record, RowRecord, row_id
from penstock.dataflow.sources import Source
from penstock.types import GroupId, NodeId, Outcome, OutcomeKind, PolicyName, RowSummary

TOKEN_S = 0.01
"""Seconds that one token takes, whoever else is being served."""
TICK_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one rollout will be: known before it runs."""

    tokens: int
    reward: float
    tokens_of: Mapping[PolicyName, int] | None = None
    """By policy; None: every policy has sampled all of them."""


@dataclass(slots=True, kw_only=True)
class _Generation:
    """One answer on its way."""

    node_id: NodeId
    runs_since: float
    """When it began, or was last resumed."""
    ends_at: float
    finish: Callable[[], None]
    busy_s: float = 0.0
    """Until it was last paused."""


class Tally:
    """The journal of the core: counts instead of storing."""

    def __init__(self) -> None:
        self.fates: dict[tuple[PolicyName, GroupId], FateRecord] = {}
        self.cut: Counter[GroupId] = Counter()
        """Tokens of answers that were stopped while they ran, by group."""
        self.tokens_of: dict[GroupId, list[int]] = {}
        """Lengths of the answers delivered for a group."""
        self.ended: list[LeaseRecord] = []
        """Leases that the core ended by itself since it was last asked."""
        self.listeners: list[Callable[[Record | Deletion], None]] = []

    def __call__(self, record: Record | Deletion) -> None:
        for listen in self.listeners:
            listen(record)
        if isinstance(record, FateRecord):
            self.fates[record.consumer, record.group_id] = record
        elif isinstance(record, LeaseRecord) and record.ended in ("truncated", "cancelled"):
            self.ended.append(record)


class VirtualRun:
    """One run: `settle()` after every event does what the service does after every command."""

    def __init__(
        self,
        terms: CoreSpec,
        sources: Sequence[Source],
        answer: Callable[[Grant], Answer],
        *,
        call_s: float = 0.0,
        tick_s: float = TICK_S,
        batch_dispatch: bool = False,
    ) -> None:
        """`batch_dispatch`: a node takes new work only when all its lanes are free."""
        self.now = 1000.0
        self._batch_dispatch = batch_dispatch
        self._tick_s = tick_s
        self.call_s = call_s
        """What the calls about one rollout or one batch add to its time."""
        self.tally = Tally()
        self.generated = 0
        """Tokens, of answers delivered or stopped."""
        tables = open_memory_tables()
        core = build_coordinator_core(terms, sources, tables, self.tally, self.now)
        assert core.host is not None, "home and its partition share this process"
        self.core = core
        self.coordinator, self.sealing, self.router = core.coordinator, core.sealing, core.router
        self.partition, self.gate = core.host.partition, core.host.gate
        self._answer = answer
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._num_asked = 0
        self._idle: dict[NodeId, int] = {}
        """Lanes of each node that hold no lease."""
        self._draining: set[NodeId] = set()
        self._served: dict[NodeId, frozenset[PolicyName]] = {}
        self._capacity: dict[NodeId, int] = {}
        self._paused: dict[NodeId, float] = {}
        """Nodes that keep their answers and generate nothing, since when."""
        self._generations: dict[tuple[GroupId, int, int], _Generation] = {}
        """By group, slot and epoch."""
        self.spells: list[tuple[NodeId, float, float]] = []
        """A lane at work: its node, from when, until when."""
        self.busy_s = 0.0
        """Of all lanes together."""
        self.after_settle: list[Callable[[], None]] = []

    # --- time ---------------------------------------------------------------------------------

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (when, self._num_events, act))

    def run(self, is_over: Callable[[], bool]) -> None:
        self.at(self.now + self._tick_s, self._tick)
        while self._events and not is_over():
            self.now, _, act = heapq.heappop(self._events)
            act()
            self.settle()

    def _tick(self) -> None:
        for node_id in self._idle:
            self._heartbeat(node_id)
        self.partition.tick(self.now)
        self.at(self.now + self._tick_s, self._tick)

    def settle(self) -> None:
        self.router.run(self.now)
        if not self.coordinator.is_finished:
            self.coordinator.issue(self.now)
        self.router.run(self.now)
        self._cancel_stopped()
        for node_id in self._idle:
            self._lease(node_id)
        for act in self.after_settle:
            act()

    def _cancel_stopped(self) -> None:
        """The core stopped these: their lanes are free, and what they had generated is lost."""
        for lease in self.tally.ended:
            seconds = self._stop((lease.group_id, lease.slot, lease.epoch))
            tokens = int(seconds / TOKEN_S)
            self.generated += tokens
            self.busy_s += seconds
            self.tally.cut[lease.group_id] += tokens
            self._idle[lease.node_id] += 1
        self.tally.ended.clear()

    # --- nodes --------------------------------------------------------------------------------

    def join(self, name: str, capacity: int, policies: Sequence[PolicyName] = ()) -> None:
        """A node that serves these policies; none: all."""
        node_id, policies = NodeId(name), tuple(policies)
        body = RegisterRequest(node_id=node_id, boot_id=name, capacity=capacity, policies=policies)
        self.partition.register(body, self.now)
        self._idle[node_id] = self._capacity[node_id] = capacity
        self._served[node_id] = frozenset(policies or self.gate.lineages)
        self._heartbeat(node_id)

    def leave(self, name: str) -> None:
        """A node returns the work that it holds, and is gone; its name is not used again."""
        node_id = NodeId(name)
        self.partition.leave(node_id, name, self.now)
        for key in [key for key, one in self._generations.items() if one.node_id == node_id]:
            self._stop(key)
        del self._idle[node_id], self._served[node_id]
        self._paused.pop(node_id, None)

    def pause(self, name: str) -> None:
        """A node keeps its answers, and generates nothing."""
        node_id = NodeId(name)
        for generation in self._generations.values():
            if generation.node_id == node_id:
                self._end_spell(generation)
        self._paused[node_id] = self.now
        self._heartbeat(node_id)

    def resume(self, name: str) -> None:
        """A paused node goes on where it was."""
        node_id = NodeId(name)
        paused_s = self.now - self._paused.pop(node_id)
        self._heartbeat(node_id)
        for key, generation in self._generations.items():
            if generation.node_id == node_id:
                generation.runs_since = self.now
                generation.ends_at += paused_s
                self.at(generation.ends_at, partial(self._end, key))

    def _end_spell(self, generation: _Generation) -> None:
        self.spells.append((generation.node_id, generation.runs_since, self.now))
        generation.busy_s += self.now - generation.runs_since

    def _stop(self, key: tuple[GroupId, int, int]) -> float:
        """How long an answer that ends now was worked on."""
        generation = self._generations.pop(key)
        if generation.node_id not in self._paused:
            self._end_spell(generation)
        return generation.busy_s

    def _end(self, key: tuple[GroupId, int, int]) -> None:
        generation = self._generations.get(key)
        if generation is None or generation.node_id in self._paused:
            return
        if self.now >= generation.ends_at:  # else it was paused meanwhile
            generation.finish()

    def stop_leasing(self, name: str) -> None:
        """A node finishes the work that it holds, and takes no more."""
        self._draining.add(NodeId(name))

    def _live(self, node_id: NodeId) -> tuple[LiveVersion, ...]:
        """Every node serves the newest version from the moment it is published."""
        return tuple(
            LiveVersion(policy=v.policy, incarnation=v.incarnation, number=v.number)
            for v in self.partition.target_versions
            if v.policy in self._served[node_id]
        )

    def _heartbeat(self, node_id: NodeId) -> None:
        live = self._live(node_id)
        is_ready = len(live) == len(self._served[node_id])
        state = NodeState.LIVE if is_ready else NodeState.STARTING
        self.partition.heartbeat(
            node_id,
            str(node_id),
            self.now,
            state=NodeState.PAUSED if node_id in self._paused else state,
            live=live,
        )

    def _lease(self, node_id: NodeId) -> None:
        if not self._idle[node_id] or not self.partition.waiting.num_slots:
            return
        if node_id in self._draining or node_id in self._paused:
            return
        if self._batch_dispatch and self._idle[node_id] < self._capacity[node_id]:
            return
        self._num_asked += 1
        request = f"r{self._num_asked}"
        self._heartbeat(node_id)
        self.partition.ask(node_id, str(node_id), request, self.now)
        grants = self.partition.lease(
            node_id, str(node_id), request, self._idle[node_id], self._live(node_id), self.now
        )
        self._idle[node_id] -= len(grants)
        for grant in grants:
            self._start(node_id, grant)

    def _start(self, node_id: NodeId, grant: Grant) -> None:
        answer, live = self._answer(grant), self._live(node_id)
        key = (grant.group_id, grant.slot, grant.epoch)
        called = self.partition.waiting.policies_of(
            self.partition.groups[grant.group_id].record.source
        )
        versions = {v.policy: ((v.incarnation, v.number),) for v in live if v.policy in called}

        def finish() -> None:
            if not self.partition.holds(node_id, grant.group_id, grant.slot, grant.epoch):
                return  # stopped meanwhile
            busy_s = self._stop(key)
            self.generated += answer.tokens
            self.busy_s += busy_s
            self.tally.tokens_of.setdefault(grant.group_id, []).append(answer.tokens)
            row = _row(node_id, grant, answer, versions, self.now)
            outcome = Outcome(kind=OutcomeKind.COMPLETED)
            self.partition.deliver(row, outcome, self.now)
            self._idle[node_id] += 1

        ends_at = self.now + answer.tokens * TOKEN_S + self.call_s
        self._generations[key] = _Generation(
            node_id=node_id, runs_since=self.now, ends_at=ends_at, finish=finish
        )
        self.at(ends_at, partial(self._end, key))

    # --- trainers -----------------------------------------------------------------------------

    def take_over(self, policy: PolicyName) -> None:
        lineage = self.coordinator.lineages[policy]
        record = lineage.incarnate(expected=0, number=0, seq=0, request_id="first", now=self.now)
        lineage.apply_incarnation(record)
        self.tally(record)
        self.coordinator.broadcast(IncarnationStarted(record=record))
        self.publish(policy)

    def publish(self, policy: PolicyName) -> None:
        lineage = self.coordinator.lineages[policy]
        record = lineage.publish(
            incarnation=lineage.incarnation,
            number=lineage.number,
            manifest_digest=f"m{lineage.number}",
            weights_digest=f"w{lineage.number}",
            now=self.now,
        )
        lineage.apply_version(record)
        self.tally(record)
        self.coordinator.broadcast(Published(record=record))

    def commit(self, consumer: Consumer) -> None:
        lineage = consumer.lineage
        record = lineage.commit(
            seq=lineage.seq + 1,
            incarnation=lineage.incarnation,
            number=lineage.number + 1,
            skipped="",
            stats="{}",
            now=self.now,
        )
        lineage.apply_commit(record)
        self.tally(record)
        self.coordinator.committed(record)
        self.coordinator.cursor_moved(consumer, consumer.sealed, self.now)

    # --- accounts -----------------------------------------------------------------------------

    def wasted(self, reason: str) -> int:
        """Tokens of groups that were dropped for this reason, and of answers that were stopped in
        such groups or for the sake of groups that live on."""
        whole = sum(fate.tokens for fate in self.tally.fates.values() if fate.reason == reason)
        others = {
            group_id
            for (_, group_id), fate in self.tally.fates.items()
            if fate.reason not in (reason, "")
        }
        cut = self.tally.cut.items()
        return whole + sum(tokens for group_id, tokens in cut if group_id not in others)


def _row(
    node_id: NodeId,
    grant: Grant,
    answer: Answer,
    versions: Mapping[PolicyName, tuple[tuple[int, int], ...]],
    now: float,
) -> RowRecord:
    return RowRecord(
        summary=RowSummary(
            row_id=row_id(grant.group_id, grant.slot, grant.epoch),
            digest="",
            outcome=OutcomeKind.COMPLETED,
            reward=answer.reward,
            sampled=answer.tokens_of or dict.fromkeys(versions, answer.tokens),
            versions=versions,
        ),
        group_id=grant.group_id,
        slot=grant.slot,
        epoch=grant.epoch,
        node_id=node_id,
        segment=0,
        offset=0,
        length=0,
        delivered_at=now,
    )
