# SPDX-License-Identifier: Apache-2.0
"""Builds a balance report from figures: a pure function, for the service and for simulations.

Computes ratios, sorts, and applies the three-zone rule once. Keeps no state between calls."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.dataflow.report import scaling_rule
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
from penstock.dataflow.report.shape import (
    ZERO,
    BalanceReport,
    Decision,
    NodeReport,
    PolicyReport,
    PolicyWindow,
    PoolReport,
    Production,
    Queues,
    StatusName,
    Thresholds,
    TimeAccount,
)
from penstock.dataflow.report.time_accounts import SERVING, shares, sum_accounts
from penstock.types import NodeId

HEALTHY: StatusName = "healthy"
SUSPECT: StatusName = "suspect"
GONE: StatusName = "gone"


def make_report(
    figures: Figures, terms: BalanceSettings, now: float, *, decision: Decision | None = None
) -> BalanceReport:
    """`decision`: made when this window closed; None to apply the rule now."""
    pool = _pool(figures, terms)
    decision = decision or _decision(figures, pool, terms, now)
    return BalanceReport(
        run=figures.run,
        at=now,
        since=figures.since,
        window=figures.window,
        decision=decision,
        pool=pool,
        policies=tuple(_policy(p, figures, pool.total_gpus) for p in figures.policies),
        nodes=tuple(_node(node, terms) for node in figures.nodes),
        thresholds=Thresholds(
            tau_low=terms.tau_low,
            tau_high=terms.tau_high,
            rho=terms.rho,
            window_versions=terms.window_versions,
            min_gpus=terms.min_gpus,
            max_gpus=terms.max_gpus,
        ),
    )


def rule_memory(report: BalanceReport) -> RuleMemory:
    """The rule's state for the next window, from this report."""
    decision = report.decision
    return RuleMemory(
        low_windows=decision.low_windows,
        last_action=decision.last_action,
        cooldown_until=decision.cooldown_until,
    )


# --- policies -------------------------------------------------------------------------------------


def _policy(policy: PolicyFigures, figures: Figures, gpus: int) -> PolicyReport:
    samples, window = policy.samples, figures.window
    entered = policy.window.entered.tokens
    return PolicyReport(
        policy=policy.policy,
        done=policy.done,
        window=PolicyWindow(
            num_versions=policy.num_versions,
            wall_time_s=window.wall_s,
            eval_time_s=policy.eval_s,
            training_time_s=max(1.0, window.wall_s - policy.eval_s),
            avg_step_time_s=_ratio(sum(s.step_s for s in samples), len(samples)),
            avg_batch_wait_s=_ratio(sum(s.wait_s for s in samples), len(samples)),
            rollout_wait_fraction=scaling_rule.wait_fraction(samples),
            num_samples=len(samples),
            production=_production(policy.window),
            throughput_per_gpu=_ratio(entered, gpus),
            staleness_histogram={
                str(age): policy.staleness[age] for age in sorted(policy.staleness)
            },
        ),
        totals=_production(policy.total),
        queues=Queues(
            issued_groups=policy.issued, ready_groups=policy.ready, sealed_batches=policy.sealed
        ),
        trainer_time=_time(policy.account),
    )


def _production(flow: Flow) -> Production:
    return Production(
        produced=flow.produced,
        entered=flow.entered,
        consumed=flow.consumed,
        replayed=flow.replayed,
        stale_skipped=flow.stale,
        wasted={why: flow.wasted[why] for why in sorted(flow.wasted)},
        accept_rate=_ratio(flow.entered.tokens, flow.produced.tokens),
        stale_rate=_ratio(flow.stale.tokens, flow.entered.tokens),
        produce_consume_ratio=_ratio(flow.produced.tokens, flow.consumed.tokens),
    )


# --- nodes ----------------------------------------------------------------------------------------


def status_of(node: NodeFigures, terms: BalanceSettings) -> StatusName:
    if node.left or node.activity is NodeActivity.SILENT:
        return GONE
    return SUSPECT if node.silent_s > terms.suspect_s else HEALTHY


def _serves(node: NodeFigures, terms: BalanceSettings) -> bool:
    """Whether it is a part of the pool whose size is decided."""
    is_serving = node.activity in SERVING and status_of(node, terms) == HEALTHY
    return is_serving and node.gpus > 0


def _node(node: NodeFigures, terms: BalanceSettings) -> NodeReport:
    return NodeReport(
        node_id=node.node_id,
        status=status_of(node, terms),
        activity="left" if node.left else node.activity.value,
        gpus=node.gpus,
        cost_per_hour=node.cost_per_hour,
        leases=node.num_leases,
        capacity=node.capacity,
        silent_s=node.silent_s,
        produced=node.produced,
        accepted=node.accepted,
        accept_rate=_ratio(node.accepted.tokens, node.produced.tokens),
        throughput_per_gpu=_ratio(node.accepted.tokens, node.gpus),
        time=_time(node.account),
    )


def _pool(figures: Figures, terms: BalanceSettings) -> PoolReport:
    nodes = figures.nodes
    serving = [node for node in nodes if _serves(node, terms)]
    by_status: dict[str, list[NodeId]] = {HEALTHY: [], SUSPECT: [], GONE: []}
    for node in nodes:
        by_status[status_of(node, terms)].append(node.node_id)
    present = [node for node in nodes if status_of(node, terms) != GONE]
    pending = [node for node in present if node.activity is NodeActivity.STARTING]
    used = shares(sum_accounts([node.window_account for node in serving]))
    return PoolReport(
        total_gpus=sum(node.gpus for node in serving),
        nodes_healthy=len(by_status[HEALTHY]),
        nodes_pending=len(pending),
        pending_gpus=sum(node.gpus for node in pending),
        nodes_draining=sum(node.activity is NodeActivity.DRAINING for node in present),
        suspect=tuple(by_status[SUSPECT]),
        gone=tuple(by_status[GONE]),
        cost_per_hour=sum(node.cost_per_hour for node in present),
        waiting_slots=figures.waiting_slots,
        busy_share=1.0 - used.get(NodeActivity.WAITING, 0.0) if used else None,
        loading_share=used.get(NodeActivity.LOADING, 0.0) if used else None,
        node_start_s_p90=figures.start_s_p90,
        produced=sum((node.produced for node in nodes), ZERO),
        accepted=sum((node.accepted for node in nodes), ZERO),
        node_time=_time(sum_accounts([*(node.account for node in nodes), figures.departed_time])),
    )


# --- the decision ---------------------------------------------------------------------------------


def _decision(figures: Figures, pool: PoolReport, terms: BalanceSettings, now: float) -> Decision:
    active = [policy for policy in figures.policies if not policy.done]
    waits = [scaling_rule.wait_fraction(policy.samples) for policy in active]
    measured = [wait for wait in waits if wait is not None]
    judged = scaling_rule.PoolWindow(
        gpus=pool.total_gpus,
        pending_gpus=pool.pending_gpus,
        wait_fraction=max(measured, default=None),
        need=_need(active, pool.busy_share),
        is_loading_weights=(pool.loading_share or 0.0) > terms.max_loading,
        window_s=figures.window.wall_s,
        start_s=figures.start_s_p90,
        complete=figures.window.complete,
    )
    verdict = scaling_rule.decide(judged, figures.memory, terms, now)
    return Decision(
        branch=verdict.branch,
        target_gpus=verdict.target_gpus,
        estimated_delta_gpus=verdict.delta_gpus,
        reason=verdict.reason,
        rollout_wait_fraction=judged.wait_fraction,
        need=judged.need,
        weight_transfer_active=judged.is_loading_weights,
        drain_first=_drain_candidates(figures, terms, -verdict.delta_gpus),
        low_windows=verdict.memory.low_windows,
        decided_at=now,
        last_action=verdict.memory.last_action,
        cooldown_until=verdict.memory.cooldown_until,
    )


def _need(policies: Sequence[PolicyFigures], busy_share: float | None) -> float | None:
    """Share of the pool's capacity that was used; the policy with the highest share decides. Pacing
    stops nodes before they overproduce, so nearly everything accepted is consumed; the nodes' idle
    time therefore counts as well."""
    ratios = [
        policy.window.consumed.tokens / policy.window.entered.tokens
        for policy in policies
        if policy.window.consumed.tokens and policy.window.entered.tokens
    ]
    if not ratios:
        return None
    return max(ratios) * (1.0 if busy_share is None else busy_share)


def _drain_candidates(
    figures: Figures, terms: BalanceSettings, num_gpus: int
) -> tuple[NodeId, ...]:
    """Nodes to drain first: suspect ones, then the least efficient, up to `num_gpus` GPUs."""
    if num_gpus <= 0:
        return ()
    suspects = [n.node_id for n in figures.nodes if status_of(n, terms) == SUSPECT]
    window_s = max(1.0, figures.window.wall_s)

    def efficiency(node: NodeFigures) -> float:
        rate = node.accepted.tokens / window_s
        return rate / (node.cost_per_hour or float(node.gpus))

    chosen: list[NodeId] = []
    for node in sorted((n for n in figures.nodes if _serves(n, terms)), key=efficiency):
        if node.gpus <= num_gpus:
            chosen.append(node.node_id)
            num_gpus -= node.gpus
    return (*suspects, *chosen)


# --- conversions ----------------------------------------------------------------------------------


def _time(account: Account) -> TimeAccount:
    names = sorted(account)
    parts = shares(account)
    return TimeAccount(
        total_s=sum(account.values()),
        seconds={name: account[name] for name in names},
        shares={name: parts[name] for name in names if name in parts},
    )


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None
