# SPDX-License-Identifier: Apache-2.0
"""Windows open and close by versions; the figures of a report belong to its window."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.dataflow.core.manifests import ManifestCache
from penstock.dataflow.records import (
    CommitRecord,
    FateRecord,
    FateState,
    IncarnationRecord,
    RowRecord,
    VersionRecord,
)
from penstock.dataflow.report.balance import (
    BalanceMonitor,
    NodeObservation,
    Observation,
    PolicyObservation,
)
from penstock.dataflow.report.figures import BalanceSettings, NodeActivity
from penstock.dataflow.report.shape import ZERO, Amount
from penstock.types import GroupId, NodeId, OutcomeKind, PolicyName, RowId, RowSummary

A, B = PolicyName("a"), PolicyName("b")
N0, N1 = NodeId("n0"), NodeId("n1")
TERMS = BalanceSettings(window_versions=2)


def balance(*policies: PolicyName) -> BalanceMonitor:
    return BalanceMonitor(
        "run",
        policies or (A,),
        TERMS,
        lambda policy, incarnation, number: number,
        ManifestCache(),
        0.0,
    )


def observed(
    *nodes: NodeObservation, policies: tuple[PolicyName, ...] = (A,), done: bool = False
) -> Observation:
    levels = PolicyObservation(issued=1, ready=2, sealed=3, done=done)
    return Observation(nodes=nodes, policies=dict.fromkeys(policies, levels), waiting_slots=0)


def node(
    name: NodeId = N0,
    activity: NodeActivity = NodeActivity.ROLLING_OUT,
    *,
    joined_at: float = 0.0,
    last_seen: float = 0.0,
) -> NodeObservation:
    return NodeObservation(
        node_id=name,
        activity=activity,
        joined_at=joined_at,
        last_seen=last_seen,
        num_leases=1,
        capacity=4,
    )


def commit(policy: PolicyName, seq: int, at: float, skipped: str = "", stats: str = "{}") -> Any:
    return CommitRecord(
        consumer=policy,
        seq=seq,
        incarnation=1,
        number=seq,
        skipped=skipped,
        stats=stats,
        at=at,
    )


def row(
    group: str, node_id: NodeId, sampled: dict[PolicyName, int], outcome: OutcomeKind
) -> RowRecord:
    return RowRecord(
        summary=RowSummary(
            row_id=RowId(f"{group}.0.1"),
            digest="",
            outcome=outcome,
            reward=None,
            sampled=sampled,
            versions={},
        ),
        group_id=GroupId(group),
        slot=0,
        epoch=1,
        node_id=node_id,
        segment=0,
        offset=0,
        length=0,
        delivered_at=0.0,
    )


def fate(
    policy: PolicyName, group: str, state: FateState, tokens: int, reason: str = "", uses: int = 0
) -> FateRecord:
    return FateRecord(
        consumer=policy,
        group_id=GroupId(group),
        task_key="k",
        source="s",
        state=state,
        reason=reason,
        tokens=tokens,
        uses=uses,
        packed_rows=b"\x91\xc0" if state is FateState.ADMITTED else b"",
    )


def test_a_window_closes_on_the_tick_after_its_last_version() -> None:
    watched = balance()
    watched.on_records([commit(A, 1, 10.0)])
    watched.look(observed(node()), 11.0)
    assert not watched.report(observed(node()), 12.0).window.complete
    watched.on_records([commit(A, 2, 20.0, skipped="no variance")])
    watched.look(observed(node()), 21.0)
    assert not watched.report(observed(node()), 22.0).window.complete, (
        "skipped batches do not count"
    )
    watched.on_records([commit(A, 3, 30.0)])
    watched.look(observed(node()), 31.0)
    report = watched.report(observed(node()), 40.0)
    assert (report.window.complete, report.window.index) == (True, 0)
    assert (report.window.opened_at, report.window.closed_at) == (0.0, 31.0)
    assert report.policies[0].window.num_versions == 2
    assert report.decision.decided_at == 31.0, "judged when it closed, not when it is read"


def test_the_first_policy_to_train_enough_closes_the_window_for_all() -> None:
    """A policy that stopped does not delay decisions."""
    watched = balance(A, B)
    watched.on_records([commit(A, 1, 10.0), commit(A, 2, 20.0)])
    both = observed(node(), policies=(A, B))
    watched.look(both, 21.0)
    report = watched.report(both, 22.0)
    assert report.window.complete
    assert [policy.window.num_versions for policy in report.policies] == [2, 0]
    assert report.policies[1].window.rollout_wait_fraction is None


def test_counts_belong_to_their_window_and_totals_to_the_run() -> None:
    watched = balance()
    done = OutcomeKind.COMPLETED
    watched.on_records([row("g1", N0, {A: 5}, done), fate(A, "g1", FateState.ADMITTED, 5)])
    watched.on_records([commit(A, 1, 1.0), commit(A, 2, 2.0)])
    watched.look(observed(node()), 3.0)
    watched.on_records([row("g2", N0, {A: 7}, done), fate(A, "g1", FateState.SEALED, 5, uses=1)])
    policy = watched.report(observed(node()), 4.0).policies[0]
    assert policy.window.production.produced.tokens == 5
    assert policy.window.production.consumed.tokens == 0
    assert policy.totals.produced.tokens == 12 and policy.totals.consumed.tokens == 5
    watched.on_records([commit(A, 3, 5.0), commit(A, 4, 6.0)])
    watched.look(observed(node()), 7.0)
    report = watched.report(observed(node()), 8.0)
    assert report.policies[0].window.production.produced.tokens == 7
    assert report.policies[0].window.production.consumed.tokens == 5
    assert report.nodes[0].produced.tokens == 7 and report.nodes[0].accepted.tokens == 0


def test_two_policies_count_their_own_tokens() -> None:
    watched = balance(A, B)
    watched.on_records(
        [
            row("g1", N0, {A: 5, B: 3}, OutcomeKind.COMPLETED),
            row("g1", N1, {A: 4}, OutcomeKind.COMPLETED),
            row("g1", N1, {B: 9}, OutcomeKind.FAILED),
            fate(A, "g1", FateState.DROPPED, 9, "uniform_reward"),
            fate(B, "g1", FateState.ADMITTED, 3),
            fate(B, "g1", FateState.DROPPED, 3, "stale"),
        ]
    )
    flows = {policy: passed.flow for policy, passed in watched.flow_counter.policies.items()}
    assert flows[A].produced == Amount(sequences=2, tokens=9)
    assert flows[A].wasted == {"uniform_reward": Amount(sequences=2, tokens=9)}
    assert flows[A].entered == ZERO, "a rule rejected it"
    assert flows[B].produced == Amount(sequences=2, tokens=12)
    assert flows[B].entered == Amount(sequences=1, tokens=3), "it entered, then became stale"
    assert flows[B].wasted["stale"] == Amount(sequences=1, tokens=3)
    assert flows[B].wasted["failed"] == Amount(sequences=1, tokens=9)
    assert watched.flow_counter.nodes[N0].accepted.counts == Amount(sequences=1, tokens=3)
    assert watched.flow_counter.nodes[N1].accepted.counts == ZERO


def test_a_group_that_lost_rows_to_a_failed_column_enters_with_the_rest() -> None:
    watched = balance()
    made = [row("g1", N0, {A: 5}, OutcomeKind.COMPLETED) for _ in range(2)]
    both = fate(A, "g1", FateState.ADMITTED, 10)
    watched.on_records([*made, both, fate(A, "g1", FateState.ADMITTED, 5)])
    watched.on_records([fate(A, "g1", FateState.SEALED, 5, uses=1)])
    flow = watched.flow_counter.policies[A].flow
    assert flow.entered.tokens == flow.consumed.tokens == 5


def test_a_replay_is_not_consumed_again() -> None:
    watched = balance()
    watched.on_records(
        [fate(A, "g1", FateState.ADMITTED, 5), fate(A, "g1", FateState.SEALED, 5, uses=1)]
    )
    watched.on_records([fate(A, "g1", FateState.SEALED, 5, uses=2)] * 2)
    assert watched.flow_counter.policies[A].flow.consumed == Amount(sequences=1, tokens=5)


def test_trainer_calls_become_waits() -> None:
    watched = balance()
    incarnation = IncarnationRecord(
        policy=A, incarnation=1, number=0, seq=0, request_id="r", at=0.0
    )
    watched.on_records([incarnation])
    now = 0.0
    for seq in range(1, 6):
        watched.batch_requested(A, seq, now)
        watched.served(A, seq, now + 2.0)
        watched.on_records([commit(A, seq, now + 8.0)])
        published = VersionRecord(
            policy=A,
            incarnation=1,
            number=seq,
            manifest_digest="",
            weights_digest="",
            at=now + 9.0,
        )
        watched.on_records([published])
        now += 10.0
        watched.look(observed(node(last_seen=now)), now)
    report = watched.report(observed(node(last_seen=now)), now)
    window = report.policies[0].window
    assert (window.avg_step_time_s, window.avg_batch_wait_s) == (10.0, 2.0)
    assert window.rollout_wait_fraction == 0.2
    assert report.decision.branch == "scale_up" and report.decision.last_action is not None
    seconds = report.policies[0].trainer_time.seconds
    assert seconds == {"waiting": 10.0, "training": 30.0, "publishing": 5.0, "other": 5.0}


def test_evaluation_is_reported_in_a_commit() -> None:
    watched = balance()
    watched.on_records([commit(A, 1, 10.0)])
    watched.batch_requested(A, 2, 10.0)
    watched.served(A, 2, 11.0)
    watched.on_records([commit(A, 2, 20.0, stats='{"seconds/eval":4.5,"loss":0.1}')])
    watched.look(observed(node()), 21.0)
    assert watched.report(observed(node()), 21.0).policies[0].window.eval_time_s == 4.5


def test_a_node_that_left_is_shown_for_one_window_and_kept_in_the_account() -> None:
    watched = balance()
    present = (node(last_seen=0.0), node(N1, last_seen=0.0))
    watched.look(observed(*present), 0.0)
    watched.look(observed(node(last_seen=10.0)), 10.0)
    report = watched.report(observed(node(last_seen=10.0)), 10.0)
    assert report.pool.gone == (N1,) and report.pool.total_gpus == 1
    assert report.pool.node_time.total_s == pytest.approx(20.0)
    for seq in range(1, 5):
        watched.on_records([commit(A, seq, 10.0 * seq)])
        watched.look(observed(node(last_seen=10.0 * seq)), 10.0 * seq)
    report = watched.report(observed(node(last_seen=40.0)), 40.0)
    assert [n.node_id for n in report.nodes] == [N0]
    assert report.pool.node_time.total_s == pytest.approx(50.0), "40 s of one, 10 s of the other"
    assert sum(report.pool.node_time.shares.values()) == pytest.approx(1.0)


def test_starts_are_measured() -> None:
    watched = balance()
    starting = NodeActivity.STARTING
    watched.look(observed(node(activity=starting, joined_at=2.0, last_seen=5.0)), 5.0)
    assert watched.report(observed(node(activity=starting)), 6.0).pool.pending_gpus == 1
    watched.look(observed(node(joined_at=2.0, last_seen=9.0)), 9.0)
    assert watched.report(observed(node(last_seen=9.0)), 9.0).pool.node_start_s_p90 == 7.0


def test_the_account_of_a_finished_policy_ends() -> None:
    watched = balance()
    watched.look(observed(node(), done=True), 5.0)
    report = watched.report(observed(node(), done=True), 500.0)
    assert report.policies[0].done and report.policies[0].trainer_time.total_s == 5.0
