# SPDX-License-Identifier: Apache-2.0
"""The one place where a run's config becomes a dataflow service; config objects end here."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.config import RunConfig
from penstock.config.dataflow import Hook, SurvivorsClosing
from penstock.dataflow.consumers import PolicyTerms
from penstock.dataflow.groups import Closing, ClosingKind, LeaseTerms
from penstock.dataflow.home import Home, IssueTerms
from penstock.dataflow.ledger import Ledger
from penstock.dataflow.partition import Partition
from penstock.dataflow.protocol import RunFacts
from penstock.dataflow.restore import restore_home, restore_partition
from penstock.dataflow.rules import ADMIT, MIX, SELECT
from penstock.dataflow.service import Dataflow, Outbox, steady_clock
from penstock.dataflow.sources import open_source
from penstock.errors import ConfigError
from penstock.types import PolicyName, SamplingSpec


def build(config: RunConfig, ledger_folder: Path) -> Dataflow:
    """Home and one partition over one ledger, as the last life left them."""
    clock = steady_clock()
    outbox = Outbox()
    ledger = Ledger(ledger_folder)
    policies = [_policy_terms(config, name) for name in config.models]
    home = Home(
        policies,
        [
            open_source(source.name, source.task, weight=source.weight, limit=source.limit)
            for source in config.sources
        ],
        MIX["weights"],
        IssueTerms(
            workflow=_workflow(config),
            seed=config.seed,
            num_slots=_num_slots(config),
        ),
        outbox,
    )
    lease = config.dataflow.lease
    partition = Partition(
        0,
        closing=_closing(config),
        terms=LeaseTerms(
            ttl_s=lease.ttl_s,
            start_to_close_s=lease.start_to_close_s,
            max_attempts=lease.max_attempts,
        ),
        journal=outbox,
    )
    restore_home(home, ledger.tables)
    for report in restore_partition(partition, ledger.tables, clock()):
        home.report(report, clock())
    service = Dataflow(home, partition, ledger, outbox, clock)
    service.trajectories = int(ledger.tables.scalar("SELECT count(*) FROM rows") or 0)
    for record in ledger.stamp():
        outbox(record)
    return service


def _policy_terms(config: RunConfig, name: str) -> PolicyTerms:
    policy = config.for_policy(name)
    admit = [rule.name for rule in policy.rules if rule.hook is Hook.ADMIT]
    [select] = [rule.name for rule in policy.rules if rule.hook is Hook.SELECT]
    return PolicyTerms(
        policy=PolicyName(name),
        groups_per_batch=policy.training.groups_per_batch,
        max_staleness=policy.training.max_staleness,
        steps=policy.training.steps,
        admit=tuple((name, ADMIT[name]) for name in admit),
        select=(select, SELECT[select]),
    )


def _num_slots(config: RunConfig) -> int:
    sizes = {name: config.for_policy(name).algorithm.num_generations for name in config.models}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"num_generations differs by policy ({sizes}), but a group has one size for all; "
            "set it once under algorithm"
        )
    return next(iter(sizes.values()))


def _closing(config: RunConfig) -> Closing:
    closing = config.dataflow.closing
    if isinstance(closing, SurvivorsClosing):
        return Closing(kind=ClosingKind.SURVIVORS, min_survivors=closing.survivors.min)
    return Closing(kind=ClosingKind(closing))


def _workflow(config: RunConfig) -> str:
    workflow = config.workflow
    return workflow if isinstance(workflow, str) else json.dumps(list(workflow.command))


def run_facts(config: RunConfig) -> RunFacts:
    first = next(iter(config.models.values()))
    sampling = config.sampling
    return RunFacts(
        run=config.name,
        policies=tuple(PolicyName(name) for name in config.models),
        workflow=_workflow(config),
        reward=config.reward or "",
        sampling=SamplingSpec(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
        ),
        engine=first.engine,
        torch_threads=first.torch_threads,
        start_to_close_s=config.dataflow.lease.start_to_close_s,
    )
