# SPDX-License-Identifier: Apache-2.0
"""What a service keeps for its balance report: counts, clocks, the running window, the last word.

Told of records on their way to the ledger, of a trainer's asking and being served, and shown the
nodes on every tick. A window closes when some policy has trained K versions in it; then the rule is
asked, once. Reads no clock and no ledger, and changes nothing of what it watches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from penstock.dataflow.core.manifests import ManifestCache
from penstock.dataflow.records import (
    CommitRecord,
    IncarnationRecord,
    MetaRecord,
    VersionRecord,
)
from penstock.dataflow.report.accounts import (
    NodeClock,
    TrainerClock,
    p90,
    subtract_accounts,
    sum_accounts,
)
from penstock.dataflow.report.build import make_report, rule_memory
from penstock.dataflow.report.figures import (
    ZERO,
    Account,
    BalanceSettings,
    Counts,
    Figures,
    Flow,
    NodeActivity,
    NodeFigures,
    PolicyFigures,
    RuleMemory,
    Window,
)
from penstock.dataflow.report.shape import BalanceReport, Decision
from penstock.dataflow.report.tally import EffectiveNumber, FlowCounter
from penstock.types import NodeId, PolicyName

EVAL_STAT = "seconds/eval"
"""A trainer that evaluates says in its commit how long, since the commit before."""
MAX_STARTS = 64

_stats = msgspec.json.Decoder(dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObservation:
    """One node as it is now."""

    node_id: NodeId
    activity: NodeActivity
    joined_at: float
    last_seen: float
    num_leases: int
    capacity: int
    gpus: int = 1
    cost_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObservation:
    """One policy's levels as they are now."""

    issued: int
    ready: int
    sealed: int
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The service as it is now."""

    nodes: tuple[NodeObservation, ...]
    policies: Mapping[PolicyName, PolicyObservation]
    waiting_slots: int


@dataclass(slots=True)
class _TrackedNode:
    """A node, and what it had done when the window opened."""

    look: NodeObservation
    clock: NodeClock
    account_before: Account = field(default_factory=dict[str, float])
    produced_before: Counts = ZERO
    accepted_before: Counts = ZERO
    left: Account | None = None
    """Its whole account, once it took its leave."""


class BalanceMonitor:
    def __init__(
        self,
        run: str,
        policies: Iterable[PolicyName],
        terms: BalanceSettings,
        number_of: EffectiveNumber,
        manifests: ManifestCache,
        now: float,
    ) -> None:
        self.flow_counter = FlowCounter(policies, number_of, manifests)
        """Restore it before anything else is told."""
        self.clocks = {policy: TrainerClock(now) for policy in self.flow_counter.policies}
        self.memory = RuleMemory()
        self._run = run
        self._terms = terms
        self._since = now
        self._nodes: dict[NodeId, _TrackedNode] = {}
        self._departed: Account = {}
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)
        self._index = 0
        self._opened_at = now
        self._versions = dict.fromkeys(self.flow_counter.policies, 0)
        self._before: dict[PolicyName, Flow] | None = None
        self._standing: tuple[Figures, Decision] | None = None
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            CommitRecord: self._committed,
            VersionRecord: self._published,
            IncarnationRecord: self._incarnated,
        }

    # --- told by the service ------------------------------------------------------------------

    def on_records(self, records: Iterable[object]) -> list[MetaRecord]:
        """Records that are on their way to the ledger, each once and in order. What comes back is
        to be written with them."""
        if self._before is None:
            self._open(self._opened_at)
        for record in records:
            self.flow_counter.on_records(record)
            handler = self._handlers.get(type(record))
            if handler is not None:
                handler(record)
        totals = self.flow_counter.pop_totals()
        return [] if totals is None else [totals]

    def batch_requested(self, policy: PolicyName, seq: int, now: float) -> None:
        """A trainer called for this batch; every poll and every rank may say so."""
        self.clocks[policy].batch_requested(seq, now)

    def served(self, policy: PolicyName, seq: int, now: float) -> None:
        """The manifest of this batch leaves."""
        self.clocks[policy].served(seq, now)

    def _committed(self, record: CommitRecord) -> None:
        clock = self.clocks.get(record.consumer)
        if clock is not None:
            eval_s = _stats.decode(record.stats).get(EVAL_STAT, 0.0)
            clock.committed(record.at, eval_s=max(0.0, eval_s))
            self._versions[record.consumer] += not record.skipped

    def _published(self, record: VersionRecord) -> None:
        clock = self.clocks.get(record.policy)
        if clock is not None:
            clock.published(record.at)

    def _incarnated(self, record: IncarnationRecord) -> None:
        clock = self.clocks.get(record.policy)
        if clock is not None:
            clock.incarnated(record.at)

    def look(self, look: Observation, now: float) -> None:
        """On every tick: book what nodes did, and judge the window when it is full."""
        for node in look.nodes:
            tracked = self._nodes.get(node.node_id)
            if tracked is None or tracked.left is not None:
                clock = NodeClock(min(now, max(node.joined_at, self._since)))
                tracked = self._nodes[node.node_id] = _TrackedNode(look=node, clock=clock)
            tracked.look = node
            started_s = tracked.clock.look(node.activity, node.last_seen, now)
            if started_s is not None:
                self._starts.append(started_s)
        here = {node.node_id for node in look.nodes}
        for node_id, tracked in self._nodes.items():
            if node_id not in here and tracked.left is None:
                tracked.left = tracked.clock.account(now)
        for policy, levels in look.policies.items():
            if levels.done:
                self.clocks[policy].stop(now)
        if max(self._versions.values(), default=0) >= self._terms.window_versions:
            self._close(look, now)

    # --- windows ------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        self._opened_at = now
        self._versions = dict.fromkeys(self.flow_counter.policies, 0)
        self._before = {policy: p.flow for policy, p in self.flow_counter.policies.items()}
        self.flow_counter.staleness = {policy: {} for policy in self.flow_counter.policies}
        for clock in self.clocks.values():
            clock.pop_samples()
            clock.eval_s = 0.0
        gone = {node_id: w for node_id, w in self._nodes.items() if w.left is not None}
        self._departed = sum_accounts([self._departed, *(w.left for w in gone.values() if w.left)])
        for node_id in gone:
            del self._nodes[node_id]
            self.flow_counter.nodes.pop(node_id, None)
        for node_id, tracked in self._nodes.items():
            made = self.flow_counter.made(node_id)
            tracked.account_before = tracked.clock.account(now)
            tracked.produced_before = made.produced.counts
            tracked.accepted_before = made.accepted.counts

    def _close(self, look: Observation, now: float) -> None:
        figures = self._measure(look, now, complete=True)
        report = make_report(figures, self._terms, now)
        self.memory = rule_memory(report)
        self._standing = (figures, report.decision)
        self._index += 1
        self._open(now)

    # --- reading ------------------------------------------------------------------------------

    def report(self, look: Observation, now: float) -> BalanceReport:
        standing = None if self._standing is None else self._standing[1]
        return make_report(self.figures(look, now), self._terms, now, standing=standing)

    def figures(self, look: Observation, now: float) -> Figures:
        """The newest complete window, or the first one as far as it got; all else as it is now."""
        running = self._measure(look, now, complete=False)
        if self._standing is None:
            return running
        closed = self._standing[0]
        judged = {policy.policy: policy for policy in closed.policies}
        made = {node.node_id: node for node in closed.nodes}
        here = {node.node_id for node in running.nodes}
        left = tuple(node for node in closed.nodes if node.left and node.node_id not in here)
        return replace(
            running,
            window=closed.window,
            policies=tuple(_in_window(p, judged[p.policy]) for p in running.policies),
            nodes=(*(_made_in(node, made.get(node.node_id)) for node in running.nodes), *left),
        )

    def _measure(self, look: Observation, now: float, *, complete: bool) -> Figures:
        return Figures(
            run=self._run,
            since=self._since,
            window=Window(
                index=self._index, opened_at=self._opened_at, closed_at=now, complete=complete
            ),
            policies=tuple(
                self._policy(policy, look, now) for policy in self.flow_counter.policies
            ),
            nodes=tuple(self._node(tracked, now) for tracked in self._nodes.values()),
            departed_time=self._departed,
            waiting_slots=look.waiting_slots,
            start_s_p90=p90(self._starts),
            memory=self.memory,
        )

    def _policy(self, policy: PolicyName, look: Observation, now: float) -> PolicyFigures:
        total = self.flow_counter.policies[policy].flow
        before = total if self._before is None else self._before[policy]
        levels, clock = look.policies[policy], self.clocks[policy]
        return PolicyFigures(
            policy=policy,
            done=levels.done,
            num_versions=self._versions[policy],
            eval_s=clock.eval_s,
            samples=clock.samples,
            window=total - before,
            total=total,
            staleness={
                age: rows.counts for age, rows in self.flow_counter.staleness[policy].items()
            },
            issued=levels.issued,
            ready=levels.ready,
            sealed=levels.sealed,
            account=clock.account(now),
        )

    def _node(self, tracked: _TrackedNode, now: float) -> NodeFigures:
        look, made = tracked.look, self.flow_counter.made(tracked.look.node_id)
        account = tracked.clock.account(now) if tracked.left is None else tracked.left
        return NodeFigures(
            node_id=look.node_id,
            activity=look.activity,
            silent_s=max(0.0, now - look.last_seen),
            gpus=look.gpus,
            cost_per_hour=look.cost_per_hour,
            num_leases=look.num_leases,
            capacity=look.capacity,
            produced=made.produced.counts - tracked.produced_before,
            accepted=made.accepted.counts - tracked.accepted_before,
            account=account,
            window_account=subtract_accounts(account, tracked.account_before),
            left=tracked.left is not None,
        )


def _in_window(running: PolicyFigures, closed: PolicyFigures) -> PolicyFigures:
    return replace(
        running,
        num_versions=closed.num_versions,
        eval_s=closed.eval_s,
        samples=closed.samples,
        window=closed.window,
        staleness=closed.staleness,
    )


def _made_in(running: NodeFigures, closed: NodeFigures | None) -> NodeFigures:
    if closed is None:
        return replace(running, produced=ZERO, accepted=ZERO, window_account={})
    return replace(
        running,
        produced=closed.produced,
        accepted=closed.accepted,
        window_account=closed.window_account,
    )
