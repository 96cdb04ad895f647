# SPDX-License-Identifier: Apache-2.0
"""Wires the pure state machines of one process: the coordinator and, if local, partition 0.

The server adds a ledger and HTTP; the simulator runs the same objects in virtual time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.dataflow.core.completion import Completion, RequiredColumns
from penstock.dataflow.core.consumers import PolicySpec
from penstock.dataflow.core.coordinator import Coordinator, IssueSpec, PartitionState
from penstock.dataflow.core.evaluations import EvaluationSpec
from penstock.dataflow.core.groups import ClosingPolicy, LeaseSpec
from penstock.dataflow.core.links import Link, link_to_coordinator, link_to_partition
from penstock.dataflow.core.manifests import ManifestCache
from penstock.dataflow.core.message_router import MessageRouter
from penstock.dataflow.core.messages import ToCoordinator, ToPartition
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.core.partition_runtime import PartitionRuntime, RowReaders
from penstock.dataflow.core.retention import Retention
from penstock.dataflow.core.rule_runner import RuleRunner, RuleSpec
from penstock.dataflow.core.sealing import Sealing
from penstock.dataflow.core.task_supply import TaskSupply
from penstock.dataflow.core.version_gate import VersionGate
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.ledger.restore import (
    load_group_rows,
    load_rule_states,
    restore_completion,
    restore_coordinator,
    restore_lineage,
    restore_link,
    restore_partition,
    restore_ready_groups,
)
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import Journal, PartitionRecord
from penstock.dataflow.sources import Source
from penstock.types import GroupId, PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSpec:
    """Everything the state machines need from a run's config."""

    policies: tuple[PolicySpec, ...]
    rules: tuple[RuleSpec, ...]
    issue: IssueSpec
    closing: ClosingPolicy
    lease: LeaseSpec
    workflow: str
    seed: int
    retain_batches: int = 8
    needs: Mapping[PolicyName, RequiredColumns] = field(
        default_factory=dict[PolicyName, RequiredColumns]
    )
    """Columns that stages add, by policy; a policy not listed has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorCore:
    router: MessageRouter
    coordinator: Coordinator
    sealing: Sealing
    manifests: ManifestCache
    host: PartitionRuntime | None
    """Partition 0, in the coordinator's process; None when all partitions run elsewhere."""


def build_coordinator_core(
    terms: CoreSpec,
    sources: Sequence[Source],
    tables: Tables,
    journal: Journal,
    now: float,
    *,
    has_partition: bool = True,
    evaluation: EvaluationSpec | None = None,
) -> CoordinatorCore:
    """Restore the coordinator from its ledger, with partition 0 in this process if there is one."""
    core = begin_coordinator_core(
        terms,
        sources,
        tables,
        journal,
        now,
        has_partition=has_partition,
        evaluation=evaluation,
    )
    finish_coordinator_restore(core, restore_ready_groups(core.coordinator, tables), now)
    return core


def begin_coordinator_core(
    terms: CoreSpec,
    sources: Sequence[Source],
    tables: Tables,
    journal: Journal,
    now: float,
    row_window: RowReaders | None = None,
    *,
    has_partition: bool = True,
    evaluation: EvaluationSpec | None = None,
) -> CoordinatorCore:
    """As `build_coordinator_core`, but without the groups that wait for a batch: the partition
    can lease, but the coordinator must not act before `restore_ready_groups` and
    `finish_coordinator_restore`."""
    router = MessageRouter()
    rules = RuleRunner(
        terms.rules,
        journal,
        seed=terms.seed,
        known=load_rule_states(tables),
        num_decisions=int(tables.scalar("SELECT max(number) FROM decisions") or 0),
    )
    policies = [policy.policy for policy in terms.policies]
    coordinator = Coordinator(
        terms.policies,
        TaskSupply(sources, rules, journal, workflow=terms.workflow, seed=terms.seed),
        rules,
        Retention(policies, retain_batches=terms.retain_batches),
        terms.issue,
        journal,
        router.to_partition,
        evaluation,
    )
    host = None
    if has_partition:

        def send(message: ToCoordinator) -> None:
            router.call(partial(coordinator.apply, message))

        host = router.runtimes[0] = _host(
            0, terms, coordinator.lineages, journal, router, send, row_window, is_colocated=True
        )
        coordinator.add_partition(0)
    for record in tables.read(PartitionRecord):
        coordinator.add_partition(record.index, PartitionState(record.state))
        router.links[record.index] = link_to_partition(record.index, journal)
        restore_link(router.links[record.index], tables)
    restore_coordinator(coordinator, tables, now)
    if host is not None:
        restore_completion(host, tables)
        restore_partition(host.partition, tables, now)
    manifests = ManifestCache()
    return CoordinatorCore(
        router=router,
        coordinator=coordinator,
        sealing=Sealing(coordinator, journal, partial(load_group_rows, tables), manifests),
        manifests=manifests,
        host=host,
    )


def finish_coordinator_restore(core: CoordinatorCore, freed: Sequence[GroupId], now: float) -> None:
    """Start the fully restored coordinator; `freed` are groups without any holder left."""
    core.coordinator.free(freed, now)
    for consumer in core.coordinator.consumers.values():
        consumer.update_num_replayable()
        core.coordinator.broadcast_horizon(consumer)
    core.router.run(now)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionCore:
    router: MessageRouter
    link: Link[ToCoordinator, ToPartition]
    host: PartitionRuntime


def build_partition_core(
    index: int,
    terms: CoreSpec,
    tables: Tables,
    journal: Journal,
    now: float,
    row_window: RowReaders | None = None,
) -> PartitionCore:
    """Restore a partition that runs in its own process."""
    router, link = MessageRouter(), link_to_coordinator(index, journal)
    restore_link(link, tables)
    names = (*(policy.policy for policy in terms.policies), *terms.issue.frozen)
    lineages = {policy: Lineage(policy) for policy in names}
    for lineage in lineages.values():
        restore_lineage(lineage, tables)
    host = _host(index, terms, lineages, journal, router, link.send, row_window, is_colocated=False)
    restore_completion(host, tables)
    restore_partition(host.partition, tables, now)
    router.run(now)
    return PartitionCore(router=router, link=link, host=host)


def _host(
    index: int,
    terms: CoreSpec,
    lineages: Mapping[PolicyName, Lineage],
    journal: Journal,
    router: MessageRouter,
    send: Callable[[ToCoordinator], None],
    row_window: RowReaders | None,
    *,
    is_colocated: bool,
) -> PartitionRuntime:
    gate = VersionGate(
        lineages,
        {policy.policy: policy.max_staleness for policy in terms.policies},
        is_lockstep=any(policy.is_lockstep for policy in terms.policies),
    )
    needs = {
        policy.policy: terms.needs.get(policy.policy, RequiredColumns())
        for policy in terms.policies
    }
    completion = Completion(needs, terms.closing, journal, send)
    partition = Partition(
        index,
        closing=terms.closing,
        terms=terms.lease,
        gate=gate,
        journal=journal,
        # A group that ended reaches the coordinator after the columns it may still miss.
        send=lambda report: router.call(partial(completion.report, report)),
    )
    return PartitionRuntime(
        partition, completion, gate, journal, row_window, is_colocated=is_colocated
    )
