# SPDX-License-Identifier: Apache-2.0
"""Live state behind the balance report: flow counters, time accounts, the open window, the last
decision.

Gets every record that goes to the ledger, batch requests and responses, and an observation of the
nodes on every tick. A window closes when a policy has trained K versions in it; the scaling rule
then decides once. Reads no clock and no ledger."""

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
from penstock.dataflow.report.build import make_report, rule_memory
from penstock.dataflow.report.figures import (
    Account,
    BalanceSettings,
    Figures,
    Flow,
    NodeActivity,
    NodeFigures,
    PolicyFigures,
    RuleMemory,
)
from penstock.dataflow.report.flow_counter import EffectiveNumber, FlowCounter
from penstock.dataflow.report.shape import ZERO, Amount, BalanceReport, Decision, WindowReport
from penstock.dataflow.report.time_accounts import (
    NodeClock,
    TrainerClock,
    p90,
    subtract_accounts,
    sum_accounts,
)
from penstock.types import NodeId, PolicyName

EVAL_STAT = "seconds/eval"
"""Commit statistic: seconds of evaluation since the previous commit."""
MAX_STARTS = 64

_stats = msgspec.json.Decoder(dict[str, float])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeObservation:
    """Current state of one node."""

    node_id: NodeId
    activity: NodeActivity
    joined_at: float
    last_seen: float
    num_leases: int
    capacity: int
    gpus: int = 1
    """0: it counts for nothing in the size of the pool."""
    cost_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObservation:
    """Current queue levels of one policy."""

    issued: int
    ready: int
    sealed: int
    done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Current state of the service."""

    nodes: tuple[NodeObservation, ...]
    policies: Mapping[PolicyName, PolicyObservation]
    waiting_slots: int


@dataclass(slots=True)
class _TrackedNode:
    """A node, and its counters when the window opened."""

    last_observation: NodeObservation
    clock: NodeClock
    account_before: Account = field(default_factory=dict[str, float])
    produced_before: Amount = ZERO
    accepted_before: Amount = ZERO
    left: Account | None = None
    """Its full account, once it has left."""


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
        """Restore it before any other call."""
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
        self._last_window: tuple[Figures, Decision] | None = None
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            CommitRecord: self._committed,
            VersionRecord: self._published,
            IncarnationRecord: self._incarnated,
        }

    # --- input from the service ---------------------------------------------------------------

    def on_records(self, records: Iterable[object]) -> list[MetaRecord]:
        """Process records that are about to be written, each once and in order. The caller writes
        the returned records with them."""
        if self._before is None:
            self._open(self._opened_at)
        for record in records:
            self.flow_counter.on_records(record)
            handler = self._handlers.get(type(record))
            if handler is not None:
                handler(record)
        totals = self.flow_counter.pop_totals()
        return [] if totals is None else [totals]

    def batch_requested(
        self, policy: PolicyName, seq: int, now: float, *, instalment: int = 0
    ) -> None:
        """A trainer requested this batch, or an instalment of it; polls and ranks may repeat it."""
        self.clocks[policy].batch_requested(seq, now, instalment=instalment)

    def served(self, policy: PolicyName, seq: int, now: float) -> None:
        """The manifest of this batch was sent."""
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

    def look(self, observation: Observation, now: float) -> None:
        """On every tick: book the nodes' time, and close the window if it is complete."""
        for node in observation.nodes:
            tracked = self._nodes.get(node.node_id)
            if tracked is None or tracked.left is not None:
                clock = NodeClock(min(now, max(node.joined_at, self._since)))
                tracked = _TrackedNode(last_observation=node, clock=clock)
                self._nodes[node.node_id] = tracked
            tracked.last_observation = node
            started_s = tracked.clock.observe(node.activity, node.last_seen, now)
            if started_s is not None and node.gpus:
                self._starts.append(started_s)
        present = {node.node_id for node in observation.nodes}
        for node_id, tracked in self._nodes.items():
            if node_id not in present and tracked.left is None:
                tracked.left = tracked.clock.account(now)
        for policy, levels in observation.policies.items():
            if levels.done:
                self.clocks[policy].stop(now)
        if max(self._versions.values(), default=0) >= self._terms.window_versions:
            self._close(observation, now)

    # --- windows ------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        self._opened_at = now
        self._versions = dict.fromkeys(self.flow_counter.policies, 0)
        self._before = {policy: p.flow for policy, p in self.flow_counter.policies.items()}
        self.flow_counter.staleness = {policy: {} for policy in self.flow_counter.policies}
        for clock in self.clocks.values():
            clock.pop_samples()
            clock.eval_s = 0.0
        departed = {node_id: n for node_id, n in self._nodes.items() if n.left is not None}
        self._departed = sum_accounts(
            [self._departed, *(n.left for n in departed.values() if n.left)]
        )
        for node_id in departed:
            del self._nodes[node_id]
            self.flow_counter.nodes.pop(node_id, None)
        for node_id, tracked in self._nodes.items():
            counters = self.flow_counter.node_counters(node_id)
            tracked.account_before = tracked.clock.account(now)
            tracked.produced_before = counters.produced.counts
            tracked.accepted_before = counters.accepted.counts

    def _close(self, observation: Observation, now: float) -> None:
        figures = self._measure(observation, now, complete=True)
        report = make_report(figures, self._terms, now)
        self.memory = rule_memory(report)
        self._last_window = (figures, report.decision)
        self._index += 1
        self._open(now)

    # --- reading ------------------------------------------------------------------------------

    def report(self, observation: Observation, now: float) -> BalanceReport:
        decision = None if self._last_window is None else self._last_window[1]
        return make_report(self.figures(observation, now), self._terms, now, decision=decision)

    def figures(self, observation: Observation, now: float) -> Figures:
        """Figures of the last complete window, or of the first one so far; totals as of now."""
        running = self._measure(observation, now, complete=False)
        if self._last_window is None:
            return running
        closed = self._last_window[0]
        closed_policies = {policy.policy: policy for policy in closed.policies}
        closed_nodes = {node.node_id: node for node in closed.nodes}
        present = {node.node_id for node in running.nodes}
        left = tuple(node for node in closed.nodes if node.left and node.node_id not in present)
        return replace(
            running,
            window=closed.window,
            policies=tuple(
                _policy_in_window(policy, closed_policies[policy.policy])
                for policy in running.policies
            ),
            nodes=(
                *(_node_in_window(node, closed_nodes.get(node.node_id)) for node in running.nodes),
                *left,
            ),
        )

    def _measure(self, observation: Observation, now: float, *, complete: bool) -> Figures:
        return Figures(
            run=self._run,
            since=self._since,
            window=WindowReport(
                index=self._index, opened_at=self._opened_at, closed_at=now, complete=complete
            ),
            policies=tuple(
                self._policy(policy, observation, now) for policy in self.flow_counter.policies
            ),
            nodes=tuple(self._node(tracked, now) for tracked in self._nodes.values()),
            departed_time=self._departed,
            waiting_slots=observation.waiting_slots,
            start_s_p90=p90(self._starts),
            memory=self.memory,
        )

    def _policy(self, policy: PolicyName, observation: Observation, now: float) -> PolicyFigures:
        total = self.flow_counter.policies[policy].flow
        before = total if self._before is None else self._before[policy]
        levels, clock = observation.policies[policy], self.clocks[policy]
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
        node = tracked.last_observation
        counters = self.flow_counter.node_counters(node.node_id)
        account = tracked.clock.account(now) if tracked.left is None else tracked.left
        return NodeFigures(
            node_id=node.node_id,
            activity=node.activity,
            silent_s=max(0.0, now - node.last_seen),
            gpus=node.gpus,
            cost_per_hour=node.cost_per_hour,
            num_leases=node.num_leases,
            capacity=node.capacity,
            produced=counters.produced.counts - tracked.produced_before,
            accepted=counters.accepted.counts - tracked.accepted_before,
            account=account,
            window_account=subtract_accounts(account, tracked.account_before),
            left=tracked.left is not None,
        )


def _policy_in_window(running: PolicyFigures, closed: PolicyFigures) -> PolicyFigures:
    return replace(
        running,
        num_versions=closed.num_versions,
        eval_s=closed.eval_s,
        samples=closed.samples,
        window=closed.window,
        staleness=closed.staleness,
    )


def _node_in_window(running: NodeFigures, closed: NodeFigures | None) -> NodeFigures:
    if closed is None:
        return replace(running, produced=ZERO, accepted=ZERO, window_account={})
    return replace(
        running,
        produced=closed.produced,
        accepted=closed.accepted,
        window_account=closed.window_account,
    )
