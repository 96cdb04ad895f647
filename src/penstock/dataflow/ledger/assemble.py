# SPDX-License-Identifier: Apache-2.0
"""The pure machines of one process, wired to each other: home with a partition beside it.

The server puts a ledger and HTTP around them; the simulator puts virtual time around the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.dataflow.core.completion import Completion, Needs
from penstock.dataflow.core.consumers import PolicyTerms
from penstock.dataflow.core.gate import Gate
from penstock.dataflow.core.groups import Closing, LeaseTerms
from penstock.dataflow.core.home import Home, IssueTerms, Shard
from penstock.dataflow.core.links import home_end, partition_end
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.core.partition_host import PartitionHost
from penstock.dataflow.core.retention import Retention
from penstock.dataflow.core.rulebook import Rulebook, RuleTerms
from penstock.dataflow.core.sealing import Sealing
from penstock.dataflow.core.supply import Supply
from penstock.dataflow.core.switchboard import Switchboard
from penstock.dataflow.core.versions import Lineage
from penstock.dataflow.ledger.restore import (
    restore_completion,
    restore_home,
    restore_lineage,
    restore_link,
    restore_partition,
    restore_waiting,
    rows_of_groups,
    rule_memories,
)
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import Journal, PartitionRecord
from penstock.dataflow.sources import Source
from penstock.types import GroupId, PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreTerms:
    """All that a run's config says to the machines."""

    policies: tuple[PolicyTerms, ...]
    rules: tuple[RuleTerms, ...]
    issue: IssueTerms
    closing: Closing
    lease: LeaseTerms
    workflow: str
    seed: int
    retain_batches: int = 8
    needs: Mapping[PolicyName, Needs] = field(default_factory=dict[PolicyName, Needs])
    """Columns that stages add, by policy; none for a policy that is not named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    board: Switchboard
    home: Home
    sealing: Sealing
    host: PartitionHost | None
    """The partition beside home, number 0; None when all are in other processes."""


def home_core(
    terms: CoreTerms,
    sources: Sequence[Source],
    tables: Tables,
    journal: Journal,
    now: float,
    *,
    has_partition: bool = True,
) -> Core:
    """Home as its last life left it, with partition 0 beside it or with all of them elsewhere."""
    core = begin_home(terms, sources, tables, journal, now, has_partition=has_partition)
    complete_home(core, restore_waiting(core.home, tables), now)
    return core


def begin_home(
    terms: CoreTerms,
    sources: Sequence[Source],
    tables: Tables,
    journal: Journal,
    now: float,
    *,
    has_partition: bool = True,
) -> Core:
    """As `home_core`, but what waits for a batch is still in the ledger: the partition can lease,
    and home can do nothing before `restore_waiting` and `complete_home`."""
    board = Switchboard()
    rules = Rulebook(
        terms.rules,
        journal,
        seed=terms.seed,
        known=rule_memories(tables),
        num_decisions=int(tables.scalar("SELECT max(number) FROM decisions") or 0),
    )
    policies = [policy.policy for policy in terms.policies]
    home = Home(
        terms.policies,
        Supply(sources, rules, journal, workflow=terms.workflow, seed=terms.seed),
        rules,
        Retention(policies, retain_batches=terms.retain_batches),
        terms.issue,
        journal,
        board.to_partition,
    )
    board.home = home
    host = None
    if has_partition:
        lineages = {policy: consumer.lineage for policy, consumer in home.consumers.items()}
        host = board.hosts[0] = _host(0, terms, lineages, journal, board, shares_home=True)
        home.add_partition(0)
    for record in tables.read(PartitionRecord):
        home.add_partition(record.index, Shard(record.state))
        board.links[record.index] = home_end(record.index, journal)
        restore_link(board.links[record.index], tables)
    restore_home(home, tables)
    if host is not None:
        restore_completion(host, tables)
        restore_partition(host.partition, tables, now)
    sealing = Sealing(home, journal, partial(rows_of_groups, tables))
    return Core(board=board, home=home, sealing=sealing, host=host)


def complete_home(core: Core, freed: Sequence[GroupId], now: float) -> None:
    """Go on with home, all of which is back; `freed` is what nobody holds any more."""
    core.home.free(freed, now)
    for consumer in core.home.consumers.values():
        core.home.count_replayable(consumer)
        core.home.tell_horizon(consumer)
    core.board.run(now)


def partition_core(
    index: int, terms: CoreTerms, tables: Tables, journal: Journal, now: float
) -> tuple[Switchboard, PartitionHost]:
    """A partition in a process of its own, as its last life left it."""
    board = Switchboard()
    board.uplink = partition_end(index, journal)
    restore_link(board.uplink, tables)
    lineages = {policy.policy: Lineage(policy.policy) for policy in terms.policies}
    for lineage in lineages.values():
        restore_lineage(lineage, tables)
    host = board.hosts[index] = _host(index, terms, lineages, journal, board, shares_home=False)
    restore_completion(host, tables)
    restore_partition(host.partition, tables, now)
    board.run(now)
    return board, host


def _host(
    index: int,
    terms: CoreTerms,
    lineages: Mapping[PolicyName, Lineage],
    journal: Journal,
    board: Switchboard,
    *,
    shares_home: bool,
) -> PartitionHost:
    gate = Gate(
        lineages,
        {policy.policy: policy.max_staleness for policy in terms.policies},
        is_lockstep=any(policy.is_lockstep for policy in terms.policies),
    )
    needs = {policy.policy: terms.needs.get(policy.policy, Needs()) for policy in terms.policies}
    completion = Completion(needs, terms.closing, journal, board.to_home)
    partition = Partition(
        index,
        closing=terms.closing,
        terms=terms.lease,
        gate=gate,
        journal=journal,
        send=lambda report: board.ended(index, report),
    )
    return PartitionHost(partition, completion, gate, journal, shares_home=shares_home)
