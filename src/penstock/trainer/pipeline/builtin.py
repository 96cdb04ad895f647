# SPDX-License-Identifier: Apache-2.0
"""The stages of a policy: the run file's, or the algorithm's own graph.

Owns the choice between the two, and the plan of a run file. The graphs are declared by the modules
of `algorithms/`, as the same data that a user writes under `pipeline`. Runs and loads no stage.
"""

from __future__ import annotations

from penstock.config import AlgorithmConfig, RunConfig
from penstock.config.algorithms import StageEntry, stage_entry
from penstock.config.device_layout import lay_out
from penstock.config.hosts import Place
from penstock.config.pipeline import ParallelConfig, PipelineConfig, PipelineStageConfig
from penstock.config.rank_hosts import host_of_each_rank
from penstock.trainer.pipeline.pass_memory import PassSpec
from penstock.trainer.pipeline.plan import Chain, Plan, PolicyToPlan, make_plan

Stages = tuple[PipelineStageConfig, ...]


def pipeline_of(config: RunConfig, policy: str) -> Stages:
    """The stages of one policy: the run file's, else the algorithm's."""
    pipeline = config.pipeline or PipelineConfig()
    settings = config.for_policy(policy)
    return pipeline.of_policy(policy) or builtin(
        settings.algorithm,
        max_tokens=config.sampling.max_tokens,
        parallel=settings.training.parallel,
    )


def plan_of(config: RunConfig, host: str | None = None, *, has_gpus: bool = False) -> Plan:
    """The plan of a run; ConfigError if it does not fit. `host`: the machine that starts it, by its
    name under `hosts`; None: the only one there. has_gpus: trainers without places use GPUs."""
    hosts = config.all_hosts
    here = next(iter(hosts)) if host is None and len(hosts) == 1 else host
    layout = lay_out(config, host=here, num_devices=0)
    policies = {
        name: PolicyToPlan(
            init=model.init,
            stages=pipeline_of(config, name),
            lora=model.lora,
            places=tuple(map(str, layout.ranks.get(name, ()))) or host_of_each_rank(config, name),
            passes=pass_spec(config, name, is_on_gpu=has_gpus or name in layout.ranks),
        )
        for name, model in config.trained.items()
    }
    shares = {Place(here, device): share for device, share in layout.engine_shares.items() if here}
    return make_plan(policies, hosts, engine_shares=shares)


def pass_spec(config: RunConfig, policy: str, *, is_on_gpu: bool) -> PassSpec:
    """How a policy's passes are made. A sample longer than a micro-batch is one by itself: at
    least the longest answer is expected."""
    training = config.for_policy(policy).training
    return PassSpec(
        num_tokens=max(training.micro_batch_tokens, config.sampling.max_tokens),
        precision=training.precision,
        recompute=training.recompute or ("layer" if is_on_gpu else "none"),
        is_on_gpu=is_on_gpu,
        is_offloaded=training.offload == "optimizer" and is_on_gpu,
    )


def chain_of(config: RunConfig, policy: str) -> Chain:
    """The stages that this policy's trainer runs on each batch."""
    [chain] = [chain for chain in plan_of(config).chains if chain.policy == policy]
    return chain


def builtin(
    algorithm: AlgorithmConfig, *, max_tokens: int, parallel: ParallelConfig | None = None
) -> Stages:
    """The algorithm's graph; `max_tokens` is the longest answer, and its models are sharded as
    `parallel` says."""
    entries = algorithm.declaration.stages(algorithm, max_tokens)
    if algorithm.agents != "parent":
        entries = [_with_agents(entry, algorithm.agents) for entry in entries]
    if algorithm.beta > 0:
        entries = _with_infer_stage(entries, "reference", "reference", "reference_logprobs")
    if algorithm.needs_proximal:
        entries = _with_infer_stage(entries, "proximal", "actor", "proximal_logprobs")
    if parallel is not None:
        spread = {"parallel": parallel.model_dump()}
        entries = [entry if entry["type"] == "compute" else entry | spread for entry in entries]
    return PipelineConfig.model_validate({"stages": entries}).stages


def _with_agents(entry: StageEntry, agents: str) -> StageEntry:
    """The stage, comparing sub-agents so if it is the one that compares."""
    if entry["role"] != "advantage":
        return entry
    return {**entry, "options": {**entry.get("options", {}), "agents": agents}}


def _with_infer_stage(
    entries: list[StageEntry], id: str, role: str, column: str
) -> list[StageEntry]:
    """Add a forward pass before training whose log-probs the actor's loss reads: of the frozen
    reference, or of the actor at the start of the step."""
    *before, train = entries
    infer = stage_entry(id, "infer", role, ["turns"], [column])
    return [infer, *before, {**train, "reads": [*train["reads"], column]}]
