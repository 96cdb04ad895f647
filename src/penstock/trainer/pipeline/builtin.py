# SPDX-License-Identifier: Apache-2.0
"""The built-in graphs, one per algorithm, as the same data that a user writes under `pipeline`.

Owns which stages an algorithm has, and the plan of a run file. Numbers are in the config; no stage
is run or loaded here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config import AlgorithmConfig, RunConfig
from penstock.config.pipeline import ParallelConfig, PipelineConfig, PipelineStageConfig
from penstock.trainer.pipeline.plan import Chain, Plan, PolicyToPlan, make_plan

_CREDITS = "penstock.trainer.pipeline.credits"
_ADVANTAGES: Mapping[str, str] = {
    "dr_grpo": f"{_CREDITS}:centred_advantage",
    "rloo": f"{_CREDITS}:leave_one_out_advantage",
    "reinforce": f"{_CREDITS}:batch_advantage",
    "opd": f"{_CREDITS}:no_advantage",
}
"""What credits a batch, where it is not the comparison inside groups."""
OVERLONG_MARGIN = 0.25
"""Share of the longest answer over which DAPO's punishment grows from 0 to -1."""

Stages = tuple[PipelineStageConfig, ...]


def pipeline_of(config: RunConfig, policy: str) -> Stages:
    """The stages of one policy: the run file's own, else the algorithm's."""
    pipeline = config.pipeline or PipelineConfig()
    settings = config.for_policy(policy)
    return pipeline.of_policy(policy) or builtin(
        settings.algorithm,
        max_tokens=config.sampling.max_tokens,
        parallel=settings.training.parallel,
    )


def plan_of(config: RunConfig) -> Plan:
    """The plan of a whole run; ConfigError when it does not fit."""
    written = {column for stage in config.dataflow.stages for column in stage.writes}
    return make_plan(
        {
            name: PolicyToPlan(init=model.init, stages=pipeline_of(config, name), lora=model.lora)
            for name, model in config.models.items()
        },
        config.pipeline.hosts if config.pipeline else (),
        from_ledger=tuple(written),
    )


def chain_of(config: RunConfig, policy: str) -> Chain:
    """What this policy's trainer does with a batch."""
    [chain] = [chain for chain in plan_of(config).chains if chain.policy == policy]
    return chain


def builtin(
    algorithm: AlgorithmConfig, *, max_tokens: int, parallel: ParallelConfig | None = None
) -> Stages:
    """The graph that the algorithm's name stands for; `max_tokens` is the longest answer, and its
    models are spread as `parallel` says."""
    if algorithm.name == "ppo":
        entries = _with_critic(algorithm)
    elif algorithm.name == "dapo":
        entries = _dapo(max_tokens)
    elif algorithm.name == "opd":
        entries = _distilled(algorithm.teacher)
    else:
        entries = [_advantage(algorithm.name), _train("turns", "advantage")]
    if algorithm.beta > 0:
        entries = _with_infer_stage(entries, "reference", "reference", "reference_logprobs")
    if algorithm.needs_proximal:
        entries = _with_infer_stage(entries, "proximal", "actor", "proximal_logprobs")
    if parallel is not None:
        spread = {"parallel": parallel.model_dump()}
        entries = [entry if entry["type"] == "compute" else entry | spread for entry in entries]
    return PipelineConfig.model_validate({"stages": entries}).stages


Entry = dict[str, Any]


def _stage(
    name: str, kind: str, role: str, reads: list[str], writes: list[str], **more: Any
) -> Entry:
    return {"id": name, "type": kind, "role": role, "reads": reads, "writes": writes, **more}


def _advantage(name: str) -> Entry:
    fn = _ADVANTAGES.get(name)
    return _stage("advantage", "compute", "advantage", ["reward"], ["advantage"], fn=fn)


def _train(*reads: str) -> Entry:
    return _stage("train", "train", "actor", [*reads], [])


def _with_critic(algorithm: AlgorithmConfig) -> list[Entry]:
    options = {"gamma": algorithm.gamma, "lam": algorithm.lam, "normalise": True}
    reads, credit = ["reward", "values"], ["advantage", "returns"]
    return [
        _stage("values", "infer", "critic", ["turns"], ["values"]),
        _stage("advantage", "compute", "critic", reads, credit, options=options),
        _stage("train_critic", "train", "critic", ["turns", "values", "returns"], []),
        _train("turns", "advantage"),
    ]


def _dapo(max_tokens: int) -> list[Entry]:
    margin = max(1, int(max_tokens * OVERLONG_MARGIN))
    options = {"how": "both", "max_length": max_tokens, "margin": margin}
    reads, shaped = ["turns", "reward", "truncated"], "shaped_reward"
    advantage = _stage("advantage", "compute", "advantage", [shaped], ["advantage"])
    return [
        _stage("overlong", "compute", "overlong", reads, [shaped, "excluded"], options=options),
        {**advantage, "rename": {shaped: "reward"}},
        _train("turns", "advantage", "excluded"),
    ]


def _distilled(teacher: str | None) -> list[Entry]:
    return [
        _stage("teacher", "infer", "teacher", ["turns"], ["teacher_logprobs"], model=teacher),
        {**_advantage("opd"), "reads": ["turns"]},
        _train("turns", "advantage", "teacher_logprobs"),
    ]


def _with_infer_stage(entries: list[Entry], name: str, role: str, column: str) -> list[Entry]:
    """A look at the batch before it is trained on, whose log-probs the actor's loss reads: of the
    frozen reference, or of the actor itself at the start of the step."""
    *before, train = entries
    infer = _stage(name, "infer", role, ["turns"], [column])
    return [infer, *before, {**train, "reads": [*train["reads"], column]}]
