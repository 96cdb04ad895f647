# SPDX-License-Identifier: Apache-2.0
"""What the pipeline and the rest of the run file say of each other.

Owns which stages the ledger has in all: those of the dataflow, and those of the pipeline that are
placed elsewhere. Holds no default and changes no value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.config.checks import Contradiction, KeyPath, did_you_mean, shown
from penstock.config.edges import Edge, picture
from penstock.config.pipeline_checks import IN_BATCH
from penstock.config.stages import StageConfig, stage_contradictions

if TYPE_CHECKING:
    from penstock.config.pipeline import PipelineStageConfig
    from penstock.config.run import RunConfig
    from penstock.config.trainer import TrainingConfig


def ledger_stages(config: RunConfig) -> list[tuple[KeyPath, StageConfig]]:
    """Every stage that works on rows, and where the file says so."""
    found: list[tuple[KeyPath, StageConfig]] = [
        (("dataflow", "stages", index), stage) for index, stage in enumerate(config.dataflow.stages)
    ]
    declared = {stage.name for stage in config.dataflow.stages}
    services = config.pipeline.services if config.pipeline else ()
    return found + [
        (("pipeline", "stages", index), stage.as_ledger_stage())
        for index, stage in services
        if stage.id not in declared
    ]


def pipeline_crossings(config: RunConfig) -> Iterator[Contradiction]:
    """Everything that the pipeline cannot say beside the other sections."""
    if config.pipeline is None:
        return
    yield from _ledger(config)
    yield from _declared_otherwise(config)
    stages = config.pipeline.stages
    for index, stage in enumerate(stages):
        at: KeyPath = ("pipeline", "stages", index)
        if stage.policy is not None and stage.policy not in config.models:
            near = did_you_mean(stage.policy, tuple(config.models))
            cure = f'did you mean "{near}"?' if near else f"use {' | '.join(config.models)}"
            text = f"stage {stage.id}: there is no policy {shown(stage.policy)}; {cure}"
            yield Contradiction(text=text, keys=((*at, "policy"), at))
        if not stage.is_service:
            yield from _missing_columns(config, at, stage)
    if stages:
        yield from _untrained(config)
        yield from _spread_twice(config)


def _ledger(config: RunConfig) -> Iterator[Contradiction]:
    """What holds for stages of the ledger holds for services, wherever they are written."""
    places, stages = zip(*found, strict=True) if (found := ledger_stages(config)) else ((), ())
    for problem in stage_contradictions(stages):
        keys = tuple((*places[int(key[1])], *key[2:]) for key in problem.keys)
        if any(key[0] == "pipeline" for key in keys):  # the dataflow has judged its own
            name = stages[int(problem.keys[0][1])].name
            yield replace(problem, text=f"stage {name}: {problem.text}", keys=keys)


def _declared_otherwise(config: RunConfig) -> Iterator[Contradiction]:
    """An entry under dataflow.stages may give a service its deadlines, not other columns."""
    declared = {stage.name: (i, stage) for i, stage in enumerate(config.dataflow.stages)}
    for index, stage in config.pipeline.services if config.pipeline else ():
        if stage.id not in declared:
            continue
        position, other = declared[stage.id]
        for key in ("reads", "writes", "on"):
            if getattr(stage, key) != getattr(other, key):
                yield Contradiction(
                    text=f"stage {stage.id} stands under dataflow.stages too, with other {key}; "
                    "write the same in both, or take it out there",
                    keys=(("pipeline", "stages", index, key), ("dataflow", "stages", position)),
                )


def _missing_columns(
    config: RunConfig, at: KeyPath, stage: PipelineStageConfig
) -> Iterator[Contradiction]:
    """Columns that nobody writes for one of the policies that run this stage."""
    assert config.pipeline is not None, "the stage is one of its stages"
    ledger = {column for _, other in ledger_stages(config) for column in other.writes}
    for policy in (stage.policy,) if stage.policy else config.models:
        mates = config.pipeline.of_policy(policy)
        known = {*IN_BATCH, *ledger, *(column for mate in mates for column in mate.writes)}
        missing = [(i, column) for i, column in enumerate(stage.reads) if column not in known]
        for position, column in missing:
            near = did_you_mean(column, sorted(known))
            cure = f'did you mean "{near}"?' if near else "add a stage that writes it"
            drawn = picture((Edge(source="?", target=stage.id, columns=(column,)),))
            yield Contradiction(
                text=f"stage {stage.id} reads {column}, which no stage writes and no batch "
                f"has: {drawn}; {cure}",
                keys=((*at, "reads", position), (*at, "reads"), at),
            )
        if missing:
            return


def _spread_twice(config: RunConfig) -> Iterator[Contradiction]:
    """Own stages say how they are spread; what stands beside them would be without effect."""
    places: list[tuple[KeyPath, TrainingConfig]] = [(("training", "parallel"), config.training)]
    for name, model in config.models.items():
        if model.training is not None:
            places.append((("models", name, "training", "parallel"), model.training))
    for at, training in places:
        if training.parallel.num_ranks > 1:
            yield Contradiction(
                text="the pipeline has stages of its own, and each says its own parallel; write "
                "it at the stages that have a model, and take it out here",
                keys=(at, ("training", "parallel")),
            )
            return


def _untrained(config: RunConfig) -> Iterator[Contradiction]:
    assert config.pipeline is not None, "asked of pipelines only"
    for name in config.models:
        mates = config.pipeline.of_policy(name)
        if not any(stage.type == "train" and stage.role == "actor" for stage in mates):
            yield Contradiction(
                text=f"no stage trains policy {name}; add one with type: train and role: actor",
                keys=(("pipeline", "stages"), ("pipeline",)),
            )
