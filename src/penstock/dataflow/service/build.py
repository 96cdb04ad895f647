# SPDX-License-Identifier: Apache-2.0
"""Builds a dataflow service from a run's config; no config object is passed further."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import groupby
from pathlib import Path

from penstock.config import RunConfig
from penstock.config.dataflow import (
    SHARED_HOOKS,
    DataflowConfig,
    SurvivorsClosing,
    sample_share,
)
from penstock.dataflow.columns.row_leases import ReaderSpec, RowTrigger
from penstock.dataflow.core.completion import RequiredColumns
from penstock.dataflow.core.consumers import PolicySpec
from penstock.dataflow.core.coordinator import IssueSpec
from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy, LeaseSpec
from penstock.dataflow.core.multiplexing import VisitSpec
from penstock.dataflow.core.rule_runner import RuleSpec
from penstock.dataflow.ledger.assemble import CoreSpec, begin_coordinator_core, build_partition_core
from penstock.dataflow.ledger.blobs import BlobStore
from penstock.dataflow.ledger.bounds import StorageLimits
from penstock.dataflow.ledger.keeping import KeepSpec
from penstock.dataflow.ledger.objects import open_payloads
from penstock.dataflow.ledger.segments import segment_bytes
from penstock.dataflow.ledger.store import Ledger, OnFailure, ignore_failure
from penstock.dataflow.records import CommandJournal
from penstock.dataflow.service.build_environments import environment_info
from penstock.dataflow.service.build_evaluations import (
    evaluation_calls,
    evaluation_share,
    evaluation_sources,
    evaluation_spec,
)
from penstock.dataflow.service.build_sources import build_source, workflow_text
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes.messages import (
    EngineInfo,
    RunInfo,
    SessionSpec,
    SharedBaseModel,
    SourceInfo,
    ToolServerInfo,
)
from penstock.dataflow.service.nodes.model_limits import ModelLimits, read_model_limits
from penstock.dataflow.service.nodes.trust import LeaseSampling
from penstock.dataflow.service.operators.observe import balance_settings
from penstock.dataflow.service.partition import CoordinatorApi, PartitionService
from penstock.dataflow.service.process import Process, monotonic_clock
from penstock.dataflow.service.read_prompts import prompt_texts
from penstock.dataflow.service.rows.handlers import RowService
from penstock.errors import ConfigError
from penstock.types import PolicyName, SamplingSpec


def build(
    config: RunConfig, ledger_folder: Path, *, on_failure: OnFailure = ignore_failure
) -> DataflowService:
    """Restore the coordinator and one partition from one ledger."""
    service = build_partly_restored(config, ledger_folder, on_failure=on_failure)
    service.complete(service.restore())
    return service


def build_partly_restored(
    config: RunConfig, ledger_folder: Path, *, on_failure: OnFailure = ignore_failure
) -> DataflowService:
    """As `build`, but not fully restored: it can lease slots, and restores the rest once it
    runs."""
    clock = monotonic_clock()
    journal = CommandJournal()
    ledger = _open(config, ledger_folder, "home", on_failure)
    sources = [build_source(config, source) for source in config.sources]
    spec = core_spec(config)
    service = DataflowService(
        partial(Process, ledger, journal, clock, _bounds(config)),
        partial(_rows, config, ledger_folder),
        partial(
            begin_coordinator_core,
            spec,
            sources,
            ledger.tables,
            journal,
            clock(),
            evaluation=evaluation_spec(config),
        ),
        run=config.name,
        stages=dict.fromkeys(map(PolicyName, config.trained), _required(config)),
        report=balance_settings(config.dataflow.report, ttl_s=config.dataflow.lease.ttl_s),
        visit=VisitSpec(**config.dataflow.sharing.model_dump()),
    )
    service.nodes.intake.limits = _model_limits(config)
    service.nodes.intake.roles = frozenset(config.roles)
    service.nodes.intake.sampling = LeaseSampling.of(run_info(config))
    service.coordinator.spot_checks.tolerated_share = config.trust.tolerated_share
    journal(ledger.next_epoch())
    return service


def build_partition(
    config: RunConfig,
    folder: Path,
    index: int,
    coordinator: CoordinatorApi,
    *,
    url: str,
    on_failure: OnFailure = ignore_failure,
) -> PartitionService:
    """Restore partition `index` from its own ledger."""
    clock = monotonic_clock()
    journal = CommandJournal()
    ledger = _open(config, folder, f"p{index}", on_failure)
    epoch = ledger.next_epoch()
    spec = core_spec(config)
    service = PartitionService(
        partial(Process, ledger, journal, clock, _bounds(config)),
        partial(_rows, config, folder),
        partial(build_partition_core, index, spec, ledger.tables, journal, clock()),
        coordinator,
        stages=_required(config),
        url=url,
        epoch=int(epoch.value),
    )
    service.nodes.trajectories = int(
        ledger.tables.scalar("SELECT count(*) FROM rows WHERE space = 'train'") or 0
    )
    service.nodes.intake.limits = _model_limits(config)
    service.nodes.intake.roles = frozenset(config.roles)
    service.nodes.intake.sampling = LeaseSampling.of(run_info(config))
    journal(epoch)
    return service


def _model_limits(config: RunConfig) -> ModelLimits:
    return read_model_limits({name: model.init for name, model in config.models.items()})


def _open(config: RunConfig, folder: Path, part: str, on_failure: OnFailure) -> Ledger:
    flow = config.dataflow
    keep = _keep(flow)
    size = None if keep is None else segment_bytes(keep.max_bytes)
    return Ledger(
        folder,
        open_payloads(flow.payload, folder, segment_bytes=size),
        store=flow.store,
        name=f"{config.name}-{part}",
        reserve_bytes=flow.bounds.disk_reserve_mb << 20,
        keep=keep,
        stages=[stage.name for stage in flow.stages],
        on_failure=on_failure,
    )


def _keep(flow: DataflowConfig) -> KeepSpec | None:
    """The partitions share the bound. Payload in memory cannot be read by anybody else."""
    if flow.payload == "memory":
        return None
    return KeepSpec(
        max_bytes=(flow.keep_mb << 20) // flow.partitions,
        share=sample_share(flow.keep),
        is_window=flow.keep == "window",
        min_free_bytes=flow.bounds.disk_free_mb << 20,
    )


def _bounds(config: RunConfig) -> StorageLimits:
    """A quarter of the memory is for queued writes; the rest is for the service's state."""
    bounds = config.dataflow.bounds
    queued = (bounds.memory_mb << 20) // 4
    return StorageLimits(
        max_queued_bytes=queued,
        high_water_queued_bytes=queued // 2,
        min_free_bytes=bounds.disk_reserve_mb << 20,
        low_water_free_bytes=bounds.disk_free_mb << 20,
    )


def _rows(config: RunConfig, folder: Path, process: Process) -> RowService:
    """Restore columns, readers and spaces, and add the config's stages and quotas."""
    stages = {stage.name: stage.writes for stage in config.dataflow.stages}
    rows = RowService(process, BlobStore(folder / "blobs"), stages)
    rows.restore()
    for stage in config.dataflow.stages:
        fields = stage.model_dump(exclude={"required", "on"})
        rows.readers.declare(ReaderSpec(**fields, on=RowTrigger(stage.on)), process.clock())
    for space in config.dataflow.spaces:
        rows.spaces.set_quota(space.name, (space.quota_mb or 0) << 20, process.clock())
    return rows


def _required(config: RunConfig) -> tuple[str, ...]:
    return tuple(stage.name for stage in config.dataflow.stages if stage.required)


def core_spec(config: RunConfig) -> CoreSpec:
    lease = config.dataflow.lease
    session = config.session_source
    return CoreSpec(
        policies=tuple(_policy_spec(config, name) for name in config.trained),
        rules=tuple(_rules(config)),
        issue=IssueSpec(
            num_slots=_num_slots(config),
            pace=config.dataflow.pace,
            session_source="" if session is None else session.name,
            policies=_called(config),
            frozen=tuple(PolicyName(name) for name in config.models if name not in config.trained),
        ),
        closing=_closing(config),
        lease=LeaseSpec(
            **lease.model_dump(),
            session_source="" if session is None else session.name,
            session_start_to_close_s=_session_s(config),
            policies=_called(config),
            evaluation_share=evaluation_share(config),
        ),
        workflow=workflow_text(config.workflow),
        seed=config.seed,
        retain_batches=config.dataflow.retain_batches,
        needs=dict.fromkeys(map(PolicyName, config.trained), _needs(config)),
    )


def _called(config: RunConfig) -> dict[str, frozenset[PolicyName]]:
    """Policies by source, of the sources that do not call all of the run."""
    found = {s.name: frozenset(map(PolicyName, config.policies_of(s))) for s in config.sources}
    found |= evaluation_calls(config)
    return {name: called for name, called in found.items() if len(called) < len(config.models)}


def _session_s(config: RunConfig) -> float:
    """Seconds from the grant: a slot waits for an agent no longer than an agent may stay idle."""
    terms = _session_spec(config)
    return 0.0 if terms is None else terms.reward_deadline_s + terms.idle_s


def _session_spec(config: RunConfig) -> SessionSpec | None:
    source = config.session_source
    if source is None or source.session is None:
        return None
    return SessionSpec(**source.session.model_dump())


def _needs(config: RunConfig) -> RequiredColumns:
    """Rules need the reward, so it is required first; trainers need the other columns."""
    added = {
        column for stage in config.dataflow.stages if stage.required for column in stage.writes
    }
    return RequiredColumns(
        judge=frozenset(added & {"reward"}),
        train=frozenset(added - {"reward"}),
        is_scored_by_nodes=config.is_scored_by_nodes,
    )


def _policy_spec(config: RunConfig, name: str) -> PolicySpec:
    training = config.for_policy(name).training
    return PolicySpec(
        policy=PolicyName(name),
        groups_per_batch=training.groups_per_batch,
        max_staleness=training.max_staleness,
        steps=training.steps,
        train_columns=_needs(config).train,
        is_lockstep=config.deterministic,
        max_partner_lag=config.dataflow.max_partner_lag,
        is_streamed=training.stream,
    )


def _rules(config: RunConfig) -> Iterator[RuleSpec]:
    """Shared hooks once, all others per policy."""
    for name in config.trained:
        is_first = name == next(iter(config.trained))
        for hook, rules in groupby(config.for_policy(name).rules, key=lambda rule: rule.hook):
            is_shared = hook in SHARED_HOOKS
            if is_shared and not is_first:
                continue
            for position, rule in enumerate(rules):
                yield RuleSpec(
                    hook=hook.value,
                    name=rule.name,
                    options=rule.options,
                    policy=None if is_shared else PolicyName(name),
                    position=position,
                )


def _num_slots(config: RunConfig) -> int:
    sizes = {name: config.for_policy(name).algorithm.num_generations for name in config.trained}
    if len(set(sizes.values())) > 1:
        raise ConfigError(
            f"num_generations differs by policy ({sizes}), but a group has one size for all; "
            "set it once under algorithm"
        )
    return next(iter(sizes.values()))


def _closing(config: RunConfig) -> ClosingPolicy:
    closing = config.dataflow.closing
    if isinstance(closing, SurvivorsClosing):
        return ClosingPolicy(kind=ClosingKind.SURVIVORS, min_survivors=closing.survivors.min)
    return ClosingPolicy(kind=ClosingKind(closing))


def run_info(config: RunConfig) -> RunInfo:
    first = next(iter(config.models.values()))
    return RunInfo(
        run=config.name,
        policies=tuple(PolicyName(name) for name in config.models),
        workflow=workflow_text(config.workflow),
        reward=config.reward_function or "",
        sampling=SamplingSpec(**config.sampling.model_dump()),
        engine=first.engine,
        engine_options=first.engine_options,
        torch_threads=first.torch_threads,
        start_to_close_s=config.dataflow.lease.start_to_close_s,
        transfer=config.weights.transfer,
        is_scored=config.is_scored_by_nodes,
        session=_session_spec(config),
        is_deterministic=config.deterministic,
        adapters=tuple(_shared_bases(config)),
        sources=tuple(_own_settings(config)),
        accepts_untrusted=config.trust.accept_untrusted,
        engines={
            PolicyName(name): EngineInfo(
                kind=model.engine,
                num_engines=model.engines,
                options=model.engine_options,
                num_devices=model.devices_per_engine,
                keeps_kv=model.kv == "keep",
                records_experts=config.for_policy(name).training.router_replay,
            )
            for name, model in config.models.items()
        },
        roles={role: PolicyName(policy) for role, policy in config.roles.items()},
        prompts=prompt_texts(config),
        tools=tuple(_tool_servers(config)),
    )


def _tool_servers(config: RunConfig) -> Iterator[ToolServerInfo]:
    for name, server in config.tools.items():
        yield ToolServerInfo(
            name=name,
            command=server.command or (),
            url=server.url or "",
            builtin=server.builtin or "",
            folder=server.folder or "",
            token=server.token or "",
            is_shared=server.is_shared,
            timeout_s=server.timeout_s,
            max_result_chars=server.max_result_chars,
        )


def _own_settings(config: RunConfig) -> Iterator[SourceInfo]:
    """Sources that differ from the run in workflow, reward, sampling, tools or policies, or have an
    environment."""
    for source in config.sources:
        own = (source.workflow, source.reward, source.sampling, source.harbor, source.tools)
        if any(setting is not None for setting in (*own, source.env, source.policies)):
            yield SourceInfo(
                name=source.name,
                workflow=workflow_text(config.workflow_of(source)),
                reward=config.reward_of(source) or "",
                sampling=SamplingSpec(**config.sampling_of(source).model_dump()),
                tools=source.tools,
                env=environment_info(source.env),
                policies=tuple(map(PolicyName, config.policies_of(source))),
            )
    yield from evaluation_sources(config)


def _shared_bases(config: RunConfig) -> Iterator[SharedBaseModel]:
    """Policies that train adapters, grouped by `init`."""
    ranks: dict[str, dict[PolicyName, int]] = {}
    for name, model in config.models.items():
        if model.lora is not None:
            ranks.setdefault(model.init, {})[PolicyName(name)] = model.lora.rank
    for by_policy in ranks.values():
        yield SharedBaseModel(policies=tuple(by_policy), rank=max(by_policy.values()))
