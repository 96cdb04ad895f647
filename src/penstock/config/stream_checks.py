# SPDX-License-Identifier: Apache-2.0
"""What cannot be streamed into a step (`training.stream`): settings that need the complete batch
before its first gradient.

Owns the list of these settings, each with its key, the reason and the fix. Sets no default and
changes no value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.config.builtin_stages import builtin_stage_for
from penstock.config.pipeline import PipelineConfig
from penstock.config.run_sections import PolicyConfig, RunSections
from penstock.config.stages import PipelineStageConfig
from penstock.options import Contradiction, KeyPath
from penstock.types import Hook

OFF = "set stream: false"
IN_ORDER = ("edf", "fifo")
"""Select rules that take groups as they come, the oldest first."""


def stream_checks(config: RunSections) -> Iterator[Contradiction]:
    """Every setting of a streamed policy that needs the complete batch."""
    for name in config.models:
        policy = config.for_policy(name)
        if policy.training.stream:
            yield from _updates(policy)
            yield from _loss(policy)
            yield from _rules(policy)
            for at, stage in _stages(config, policy):
                yield from _stage(policy, at, stage)


def _contradiction(policy: PolicyConfig, text: str, section: str, *key: str) -> Contradiction:
    """One that is shown at this key of the policy's section, or else of the shared one."""
    keys: Sequence[KeyPath] = (
        ("models", policy.name, section, *key),
        (section, *key),
        ("models", policy.name, "training", "stream"),
        ("training", "stream"),
    )
    return Contradiction(text=text, keys=tuple(keys))


def _updates(policy: PolicyConfig) -> Iterator[Contradiction]:
    training = policy.training
    for key in ("minibatches", "epochs"):
        if (value := getattr(training, key)) > 1:
            yield _contradiction(
                policy,
                f"stream: a streamed batch is one update, and {key} is {value}, which needs the "
                f"complete batch first; set {key}: 1, or {OFF}",
                "training",
                key,
            )
    if training.parallel.num_ranks > 1:
        yield _contradiction(
            policy,
            f"stream: a batch is divided over {training.parallel.num_ranks} ranks by the lengths "
            f"of all its rows, so it must be complete; set parallel: {{dp: 1, tp: 1}}, or {OFF}",
            "training",
            "parallel",
        )


def _loss(policy: PolicyConfig) -> Iterator[Contradiction]:
    algorithm = policy.algorithm
    if algorithm.aggregation == "token-mean":
        yield _contradiction(
            policy,
            "stream: token-mean divides by the tokens of the complete batch, which are known only "
            "when the last row is in; set aggregation: seq-mean-token-mean, seq-mean-token-sum or "
            f"fixed-constant, or {OFF}",
            "algorithm",
            "aggregation",
        )
    if why := algorithm.declaration.whole_batch:
        yield _contradiction(
            policy,
            f"stream: {algorithm.name} needs the complete batch: {why}; choose another algorithm, "
            f"or {OFF}",
            "algorithm",
            "name",
        )


def _rules(policy: PolicyConfig) -> Iterator[Contradiction]:
    """A streamed batch takes groups as they are admitted."""
    for rule in policy.rules:
        why = ""
        if rule.hook is Hook.SELECT and rule.name not in IN_ORDER:
            why = f"select {rule.name} compares all groups of a batch; use select: edf or fifo"
        elif rule.hook is Hook.REPLAY:
            why = f"replay {rule.name} adds groups when the batch is complete; remove it"
        if why:
            yield _contradiction(policy, f"stream: {why}, or {OFF}", "dataflow", "rules")


def _stages(
    config: RunSections, policy: PolicyConfig
) -> Iterator[tuple[KeyPath, PipelineStageConfig]]:
    """The stages that the policy's trainer runs: of the file, else of the algorithm."""
    written = config.pipeline.stages if config.pipeline else ()
    if written:
        for index, stage in enumerate(written):
            if stage.policy in (None, policy.name) and not stage.is_service:
                yield ("pipeline", "stages", index), stage
        return
    algorithm = policy.algorithm
    entries = algorithm.declaration.stages(algorithm, config.sampling.max_tokens)
    for stage in PipelineConfig.model_validate({"stages": entries}).stages:
        yield ("algorithm", "name"), stage


def _stage(
    policy: PolicyConfig, at: KeyPath, stage: PipelineStageConfig
) -> Iterator[Contradiction]:
    keys = (at, *_contradiction(policy, "", "algorithm", "name").keys)
    if stage.type == "train" and stage.role != "actor":
        yield Contradiction(
            text=f"stream: stage {stage.id} trains the {stage.role} before the actor, on the "
            f"complete batch; choose an algorithm without it, such as grpo, or {OFF}",
            keys=keys,
        )
    if stage.parallel.num_ranks > 1 and not policy.training.parallel.num_ranks > 1:
        yield Contradiction(
            text=f"stream: stage {stage.id} has {stage.parallel.num_ranks} ranks, and a batch is "
            f"divided over them when it is complete; set parallel: {{dp: 1, tp: 1}}, or {OFF}",
            keys=keys,
        )
    if stage.type == "train" or (stage.type == "infer" and stage.fn is None):
        return
    builtin = builtin_stage_for(stage.type, stage.role, stage.fn)
    if builtin is None:
        yield Contradiction(
            text=f"stream: stage {stage.id} runs your own function, which may compare rows of the "
            f"complete batch; use a built-in function that compares within a group, or {OFF}",
            keys=keys,
        )
    elif not builtin.is_by_group:
        yield Contradiction(
            text=f"stream: stage {stage.id} normalises over the complete batch; use a function "
            f"that compares within a group, such as group_advantage or centred_advantage, or {OFF}",
            keys=keys,
        )
