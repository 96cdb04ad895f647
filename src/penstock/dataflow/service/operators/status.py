# SPDX-License-Identifier: Apache-2.0
"""The run's state for operators: status and waits. Read-only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from penstock.dataflow.core.consumers import Consumer
from penstock.dataflow.core.evaluations import Evaluations
from penstock.dataflow.core.groups import Node
from penstock.dataflow.core.stalls import Link, NodeWait, TrainerWait, find_chain
from penstock.dataflow.explain.starvation import is_starving, starvation, unserved
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.operators.messages import (
    EvaluationStatus,
    NodeStatus,
    PartStatus,
    PolicyStatus,
    Status,
    WaitStatus,
)
from penstock.types import NodeId, PolicyName

TRAINER_SILENT_S = 15.0
"""Report a trainer after this time without a request."""


def status(service: DataflowService, run: str) -> Status:
    now = service.process.clock()
    remote = service.partitions.status(now)
    figures = [service.nodes.figures(), *(partition.figures for partition in remote)]
    consumers = service.coordinator.consumers.values()
    errors = service.coordinator.rules.errors
    return Status(
        run=run,
        uptime_s=now - service.process.started_at,
        finished=service.is_finished,
        policies=tuple(_policy(found, service.trainers.progress) for found in consumers),
        nodes=tuple(_nodes(service, now)),
        waiting=tuple(_waiting(service, now)),
        trajectories=sum(found.trajectories for found in figures),
        sampled_tokens=sum(found.sampled_tokens for found in figures),
        untrusted_tokens=sum(found.untrusted_tokens for found in figures),
        wasted_tokens=_wasted(service, sum(found.failed_tokens for found in figures)),
        tokens_per_s=sum(found.tokens_per_s for found in figures),
        salvaged_tokens=sum(found.salvaged_tokens for found in figures),
        partitions=remote,
        detail={"failing_rules": dict(errors)} if errors else {},
        alarms=tuple(
            starvation(consumer, service.process.ledger.tables)
            for consumer in consumers
            if is_starving(consumer, service.coordinator)
        ),
        checks=dict(service.coordinator.spot_checks.counts),
        failed=service.coordinator.failure_limit.cause(now),
        evaluation=_evaluation(service.coordinator.evaluations),
        chain=_chain(service, now),
    )


def _evaluation(found: Evaluations | None) -> EvaluationStatus | None:
    if found is None:
        return None
    last, best, running = found.last, found.best, found.current
    return EvaluationStatus(
        policy=found.spec.policy,
        last=None if last is None else last.number,
        scores={} if last is None else dict(last.scores),
        best=None if best is None else best.number,
        running=None if running is None else running.number,
        num_answered=0 if running is None else len(found.ended),
        num_questions=found.spec.num_questions,
    )


def _wasted(service: DataflowService, failed: int) -> dict[str, int]:
    return {**service.coordinator.waste.tokens, **({"failed": failed} if failed else {})}


def _policy(consumer: Consumer, progress: Mapping[PolicyName, int]) -> PolicyStatus:
    lineage, batch = consumer.lineage, consumer.newest_batch
    commit = lineage.last_commit
    return PolicyStatus(
        policy=lineage.policy,
        incarnation=lineage.incarnation,
        number=lineage.number,
        steps=consumer.terms.steps,
        published=lineage.published,
        issued=consumer.num_undecided,
        ready=consumer.num_admitted,
        sealed=len(consumer.sealed),
        room=max(0, int(consumer.room())),
        reward_mean=None if batch is None else batch.reward_mean,
        staleness_mean=None if batch is None else batch.staleness_mean,
        staleness_max=None if batch is None else batch.staleness_max,
        stats={} if commit is None else msgspec.json.decode(commit.stats, type=dict[str, float]),
        skipped=lineage.num_skipped,
        last_skip=lineage.last_skip if lineage.num_skipped else "",
        resumed_at=lineage.resumed_at,
        repeats_to=lineage.repeats_to,
        parts=tuple(_parts(consumer)),
        progress=progress.get(lineage.policy, 0),
        partner_lag={
            partner: {str(age): ages[age] for age in sorted(ages)}
            for partner, ages in consumer.partner_lags.items()
        },
    )


def _parts(consumer: Consumer) -> Iterator[PartStatus]:
    for (source, role), count in sorted(consumer.parts.counts.items()):
        yield PartStatus(
            source=source,
            role=role,
            groups=count.groups,
            dropped=dict(count.dropped),
            rows=count.rows,
            tokens=count.tokens,
            reward_mean=count.reward_sum / count.rows if count.rows else None,
        )


def _nodes(service: DataflowService, now: float) -> Iterator[NodeStatus]:
    for node_id, node in service.partition.nodes.items():
        yield NodeStatus(
            node_id=node_id,
            state=_state(node),
            live=node.live,
            num_leases=node.num_leases,
            capacity=node.record.capacity,
            silent_s=round(max(0.0, now - node.last_seen), 1),
            delivered=node.num_delivered,
            work=node.work,
            num_done=node.num_done,
            is_untrusted=node.is_untrusted,
        )


def _state(node: Node) -> str:
    if node.is_expired:
        return "silent"
    return "quarantined" if node.is_quarantined else node.state.value


def _waiting(service: DataflowService, now: float) -> Iterator[WaitStatus]:
    """Name, for every wait, the party that must act next."""

    def wait(who: str, on: str, since: float) -> WaitStatus:
        return WaitStatus(who=who, on=on, since_s=round(now - since, 1))

    for (who, on), since in service.process.waiting_since.items():
        yield wait(who, _batch_blocker(service) if on == "batch" else _blocker(service, who), since)
    if service.source_error:
        yield wait("dataflow", f"a source: {service.source_error}", now)
    for policy, consumer in service.coordinator.consumers.items():
        seen = service.trainers.seen.get(policy, service.process.started_at)
        if not consumer.has_trained_all and now - seen > TRAINER_SILENT_S:
            yield wait("dataflow", f"trainer {policy}", seen)
    yield from (wait("dataflow", text, now) for text in unserved(service.partition))
    nodes = [node for node in service.partition.nodes.values() if not node.is_evaluator]
    if not any(node.state == "live" and not node.is_expired for node in nodes):
        yield wait("dataflow", "a live rollout node", _last_live_at(service))


def _chain(service: DataflowService, now: float) -> tuple[Link, ...]:
    """Who waits for whom, behind the policy that has waited for longest."""
    waits = [
        _trainer_wait(service, policy, consumer, now)
        for policy, consumer in service.coordinator.consumers.items()
        if not consumer.has_trained_all
        and (consumer.sealed or not service.coordinator.has_ended(consumer))
    ]
    if not waits:
        return ()
    nodes = [
        NodeWait(
            node_id=node_id,
            num_leases=node.num_leases,
            silent_s=max(0.0, now - node.last_seen) if node.is_expired else 0.0,
            work=node.work,
            is_untrusted=node.is_untrusted,
        )
        for node_id, node in service.partition.nodes.items()
        if not node.is_evaluator
    ]
    longest = max(waits, key=lambda wait: wait.since_s)
    return find_chain(longest, nodes, blocker=_blocker(service, ""))


def _trainer_wait(
    service: DataflowService, policy: PolicyName, consumer: Consumer, now: float
) -> TrainerWait:
    """What a trainer does, by its calls: it asks for a batch every few seconds while it waits."""
    is_polling = (f"trainer {policy}", "batch") in service.process.waiting_since
    seen = service.trainers.seen.get(policy, service.process.started_at)
    is_waiting = is_polling or (not consumer.sealed and now - seen <= TRAINER_SILENT_S)
    commit = consumer.lineage.last_commit
    last_at = service.process.started_at if commit is None else commit.at
    return TrainerWait(
        policy=policy,
        seq=consumer.lineage.seq + 1,
        is_waiting=is_waiting,
        has_batch=bool(consumer.sealed),
        since_s=max(0.0, now - (max(last_at, service.process.started_at) if is_waiting else seen)),
    )


def _blocker(service: DataflowService, who: str) -> str:
    """What a node waits for that gets no work."""
    if not service.process.has_room:
        return "free memory or disk space; see the storage limits in the config"
    node, partition = service.partition.nodes.get(NodeId(who)), service.partition
    if node is not None and node.is_quarantined:
        return (
            "nothing: its credential is in quarantine; check its engine, then join with a new token"
        )
    if node is not None and node.is_evaluator:
        return "a version to evaluate"
    if node is not None and partition.waiting.has_any_for(node):
        return "a newer version to load"
    return _issue_blocker(service, node)


def _issue_blocker(service: DataflowService, node: Node | None) -> str:
    """Why there is no group that a node could take."""
    coordinator = service.coordinator
    is_gateway = node is not None and node.is_session_gateway
    shares = coordinator.supply.shares()
    if not shares:
        return "tasks: every source is exhausted"
    if not is_gateway and all(share.name == coordinator.session_source for share in shares):
        return "tasks: the only source is the sessions of external agents"
    if service.source_error:
        return f"tasks: a source failed with {service.source_error}"
    missing = [found.missing_stages for found in coordinator.consumers.values()]
    if any(missing):
        return f"a worker of stage {', '.join(filter(None, missing))}"
    served = [p for p in coordinator.consumers if node is None or p in (node.policies or (p,))]
    return f"trainer {' or '.join(served)} to commit"


def _last_live_at(service: DataflowService) -> float:
    """When a node was last known to be live: its last delivery or heartbeat."""
    silent = [node.last_seen for node in service.partition.nodes.values() if node.state == "live"]
    delivered = [service.nodes.tokens_seen[-1][0]] if service.nodes.tokens_seen else []
    return max([service.process.started_at, *silent, *delivered])


def _batch_blocker(service: DataflowService) -> str:
    holding = [n for n, node in service.partition.nodes.items() if node.num_leases]
    if holding:
        num_open = len(service.coordinator.open)
        groups = f"{num_open:,} group{'' if num_open == 1 else 's'}"
        return f"{groups} on {', '.join(sorted(holding)[:3])}"
    if service.partition.waiting.num_slots:
        return "a node to take work"
    return "work to be issued"
