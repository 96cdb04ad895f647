# SPDX-License-Identifier: Apache-2.0
"""Contradictions between the pipeline and the rest of the run file, and between stages that work on
rows of the ledger, wherever the file declares them.

Owns which key declares each stage that works on rows, and which settings have no effect with custom
stages. Sets no default and changes no value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from penstock.config.algorithms import CLIPPED_LOSS_KEYS, AlgorithmConfig
from penstock.config.builtin_stages import builtin_stage_for
from penstock.config.pipeline import PipelineConfig
from penstock.config.pipeline_checks import (
    ADVANTAGE_COLUMN,
    BATCH_COLUMNS,
    CRITIC_COLUMNS,
    missing_column_text,
)
from penstock.config.run_sections import PolicyConfig, RunSections
from penstock.config.stage_graph import (
    Edge,
    GraphProblem,
    cycles,
    draw_path,
    duplicate_ids,
    duplicate_writers,
    unknown_reads,
)
from penstock.config.stages import INITIAL_COLUMNS, PipelineStageConfig, StageConfig
from penstock.config.trainer import TrainingConfig
from penstock.options import Contradiction, KeyPath
from penstock.plugins import unknown

PolicyStage = tuple[KeyPath, PipelineStageConfig, PolicyConfig]
"""A stage, its key, and one of the policies whose trainers run it."""

BUILTIN_GRAPH_KEYS = ("gamma", "lam")
"""Keys of `algorithm` that are options of a stage if the file has stages."""

BUILTIN_LOSS_KEYS = ("beta", "tau", *sorted(CLIPPED_LOSS_KEYS))
"""Keys of `algorithm` that a custom loss ignores. Not `entropy_coef`: above 0, the entropy has a
gradient with any loss."""


def row_stages(config: RunSections) -> list[tuple[KeyPath, StageConfig]]:
    """Every stage that works on rows, with the key that declares it."""
    services = dict[str, tuple[int, StageConfig]]()
    for index, stage in config.pipeline.services if config.pipeline else ():
        if stage.writes:
            services[stage.id] = index, stage.to_stage_config()
    found: list[tuple[KeyPath, StageConfig]] = []
    for position, declared in enumerate(config.dataflow.stages):
        index, derived = services.get(declared.name, (0, None))
        place = ("pipeline", index) if declared == derived else ("dataflow", position)
        found.append(((place[0], "stages", place[1]), declared))
    return found


def row_stage_checks(config: RunSections) -> Iterator[Contradiction]:
    """What cannot work among the stages that work on rows."""
    places = [at for at, _ in row_stages(config)]
    for problem in _row_stage_problems(config.dataflow.stages):
        yield problem.at(places[problem.index])


def _row_stage_problems(stages: Sequence[StageConfig]) -> Iterator[GraphProblem]:
    """What cannot work whatever the rest of the file says."""
    found = [
        *(replace(problem, key=("name",)) for problem in duplicate_ids(stages)),
        *duplicate_writers(stages),
        *unknown_reads(stages, INITIAL_COLUMNS),
        *_mistimed_columns(stages),
    ]
    yield from found or cycles(stages)  # a column that is wrong itself may look like a cycle


def _mistimed_columns(stages: Sequence[StageConfig]) -> Iterator[GraphProblem]:
    """Columns written too late for those who read them."""
    writers = {column: stage for stage in reversed(stages) for column in stage.writes}
    for index, stage in enumerate(stages):
        for position, column in enumerate(stage.writes):
            if text := _write_problem(column, stage):
                key = ("writes", position)
                yield GraphProblem(index=index, key=key, text=f"stage {stage.name}: {text}")
        for position, column in enumerate(stage.reads):
            writer = writers.get(column)
            if writer is not None and writer.on == "admitted" and stage.on == "delivered":
                text = f"stage {stage.name} works on delivered rows and reads {column}, which "
                text += f"stage {writer.name} writes for admitted groups only; set on: admitted"
                yield GraphProblem(index=index, key=("reads", position), text=text)


def _write_problem(column: str, stage: StageConfig) -> str:
    if column == "turns":
        return "every row has turns on delivery, and a column is written once; rename this one"
    if column == "reward" and stage.on == "admitted":
        return "admission depends on reward, so reward must be written before; set on: delivered"
    return ""


def group_comparer(config: RunSections, policy: str) -> str | None:
    """What compares the members of this policy's groups: its algorithm or, if the file has stages,
    the stage that writes the advantages. None if nothing does, or an unknown custom function."""
    stages = config.pipeline.of_policy(policy) if config.pipeline else ()
    if not stages:
        algorithm = config.for_policy(policy).algorithm
        return algorithm.name if algorithm.declaration.is_group_relative else None
    for stage in stages:
        builtin = builtin_stage_for(stage.type, stage.role, stage.fn)
        if builtin and builtin.is_group_relative and ADVANTAGE_COLUMN in stage.writes:
            return f"stage {stage.id}"
    return None


def pipeline_cross_checks(config: RunSections) -> Iterator[Contradiction]:
    """Every contradiction between the pipeline and other sections."""
    pipeline = config.pipeline
    if pipeline is None:
        return
    yield from _conflicting_declarations(config, pipeline)
    for index, stage in enumerate(pipeline.stages):
        at: KeyPath = ("pipeline", "stages", index)
        if stage.policy is not None and stage.policy not in config.trained:
            text = f"stage {stage.id}: {unknown('policy', stage.policy, config.trained)}"
            yield Contradiction(text=text, keys=((*at, "policy"), at))
        if not stage.is_service:
            yield from _missing_columns(config, pipeline, at, stage)
    if pipeline.stages:
        yield from _untrained_policies(config, pipeline)
        by_policy = tuple(_stages_by_policy(config, pipeline))
        yield from _untrained_critic(by_policy, pipeline)
        yield from _redundant_parallel(config)
        yield from dict.fromkeys(
            (*_missing_columns_for_loss(by_policy), *_conflicting_teacher(by_policy))
        )
        yield from dict.fromkeys(_ineffective_settings(config, pipeline))


def _conflicting_declarations(
    config: RunSections, pipeline: PipelineConfig
) -> Iterator[Contradiction]:
    """An entry under dataflow.stages may give a service its deadlines, not other columns."""
    declared = {stage.name: (i, stage) for i, stage in enumerate(config.dataflow.stages)}
    for index, stage in pipeline.services:
        if stage.id not in declared:
            continue
        position, other = declared[stage.id]
        for key in ("reads", "writes", "on"):
            if getattr(stage, key) != getattr(other, key):
                yield Contradiction(
                    text=f"stage {stage.id} is also under dataflow.stages, with other {key}; "
                    "write the same in both, or remove it there",
                    keys=(("pipeline", "stages", index, key), ("dataflow", "stages", position)),
                )


def _missing_columns(
    config: RunSections, pipeline: PipelineConfig, at: KeyPath, stage: PipelineStageConfig
) -> Iterator[Contradiction]:
    """Columns that no stage writes for one of the policies that run this stage."""
    writer = {column: other for _, other in row_stages(config) for column in other.writes}
    sent = {column for column, other in writer.items() if other.required}
    for policy in (stage.policy,) if stage.policy else config.trained:
        inside = (other for other in pipeline.of_policy(policy) if not other.is_service)
        known = {*BATCH_COLUMNS, *sent, *(column for other in inside for column in other.writes)}
        missing = [*unknown_reads((stage,), known)]
        for problem in missing:
            column = stage.reads[int(problem.key[1])]
            text = _unsent_column(stage, column, writer.get(column)) or problem.text
            yield replace(problem, text=text).at(at)
        if missing:
            return


def _unsent_column(stage: PipelineStageConfig, column: str, writer: StageConfig | None) -> str:
    """Why trainers do not get a column that a stage of the dataflow writes."""
    if writer is None:
        return ""
    drawing = draw_path((Edge(source=writer.name, target=stage.id, columns=(column,)),))
    return (
        f"stage {stage.id} reads {column}, which stage {writer.name} of the dataflow writes with "
        f"required: false, so trainers do not get it: {drawing}; set required: true there"
    )


def _redundant_parallel(config: RunSections) -> Iterator[Contradiction]:
    """`training.parallel` has no effect if the file has stages."""
    places: list[tuple[KeyPath, TrainingConfig]] = [(("training", "parallel"), config.training)]
    for name, model in config.models.items():
        if model.training is not None:
            places.append((("models", name, "training", "parallel"), model.training))
    for at, training in places:
        if training.parallel.num_ranks > 1:
            yield Contradiction(
                text="parallel has no effect here because the pipeline has custom stages; write it "
                "at the stages that have a model, and remove it here",
                keys=(at, ("training", "parallel")),
            )
            return


def _stages_by_policy(config: RunSections, pipeline: PipelineConfig) -> Iterator[PolicyStage]:
    """Each stage with every policy whose trainer runs it."""
    for index, stage in enumerate(pipeline.stages):
        for policy in (stage.policy,) if stage.policy else config.trained:
            if policy in config.models:
                yield ("pipeline", "stages", index), stage, config.for_policy(policy)


def _missing_columns_for_loss(by_policy: Iterable[PolicyStage]) -> Iterator[Contradiction]:
    """Columns that the algorithm's built-in loss needs."""
    for at, stage, policy in by_policy:
        if (stage.type, stage.role, stage.fn) != ("train", "actor", None):
            continue
        algorithm, needed = policy.algorithm, dict[str, str]()
        for column in algorithm.declaration.loss_reads:
            needed[column] = f"{algorithm.name} learns from"
        if algorithm.beta > 0:
            needed["reference_logprobs"] = f"beta {algorithm.beta:g} weighs the distance to"
        if algorithm.needs_proximal:
            needed["proximal_logprobs"] = (
                f"the loss of {algorithm.name} with these settings compares with"
            )
        for column, why in needed.items():
            if column not in stage.reads:
                fix = ", or set algorithm.beta: 0.0" if why.startswith("beta") else ""
                yield Contradiction(
                    text=f"stage {stage.id}: {missing_column_text(why, column)}{fix}",
                    keys=((*at, "reads"), at),
                )


def _conflicting_teacher(by_policy: Iterable[PolicyStage]) -> Iterator[Contradiction]:
    """`algorithm.teacher` is for the built-in graph; a stage has its own `model`, and the two must
    agree."""
    for at, stage, policy in by_policy:
        teacher = policy.algorithm.teacher
        is_builtin_teacher = (stage.type, stage.role, stage.fn) == ("infer", "teacher", None)
        if teacher is None or not is_builtin_teacher or stage.model == teacher:
            continue
        used = f"uses {stage.model}" if stage.model else "has no model and uses the policy"
        yield Contradiction(
            text=f"stage {stage.id} {used}, so algorithm.teacher has no effect; "
            f"write model: {teacher} at the stage",
            keys=((*at, "model"), at),
        )


def _ineffective_settings(config: RunSections, pipeline: PipelineConfig) -> Iterator[Contradiction]:
    """Settings of the algorithm that nothing reads; its presets do not count as written."""
    for name, model in config.trained.items():
        algorithm = config.for_policy(name).algorithm
        at: KeyPath = ("models", name, "algorithm") if model.algorithm else ("algorithm",)
        for key, why in _ineffective_keys(algorithm, pipeline.of_policy(name)):
            yield Contradiction(
                text=f"{why}, so {key} has no effect here; write options: "
                f"{{{key}: {getattr(algorithm, key)}}} at that stage, if its function takes it, "
                "and remove it here",
                keys=((*at, key), ("algorithm", key)),
            )


def _ineffective_keys(
    algorithm: AlgorithmConfig, stages: Sequence[PipelineStageConfig]
) -> Iterator[tuple[str, str]]:
    for key in _written(algorithm, BUILTIN_GRAPH_KEYS):
        yield key, "the pipeline has a custom stage that writes the advantages"
    for stage in stages:
        if (stage.type, stage.role) == ("train", "actor") and stage.fn is not None:
            for key in _written(algorithm, BUILTIN_LOSS_KEYS):
                yield key, f"stage {stage.id} has a custom loss"


def _written(algorithm: AlgorithmConfig, keys: Sequence[str]) -> Iterator[str]:
    """Keys whose value is not the default; a resolved file has all keys."""
    preset = algorithm.declaration.preset
    for key in keys:
        default = type(algorithm).model_fields[key].default
        if getattr(algorithm, key) not in (default, preset.get(key, default)):
            yield key


def _trains(pipeline: PipelineConfig, policy: str, role: str) -> bool:
    kinds = ((stage.type, stage.role) for stage in pipeline.of_policy(policy))
    return ("train", role) in kinds


def _untrained_policies(config: RunSections, pipeline: PipelineConfig) -> Iterator[Contradiction]:
    for name in config.trained:
        if not _trains(pipeline, name, "actor"):
            yield Contradiction(
                text=f"no stage trains policy {name}; add one with type: train and role: actor",
                keys=(("pipeline", "stages"), ("pipeline",)),
            )


def _untrained_critic(
    by_policy: Iterable[PolicyStage], pipeline: PipelineConfig
) -> Iterator[Contradiction]:
    """Only a trained critic has a value head."""
    for at, stage, policy in by_policy:
        uses_critic = (stage.type, stage.role, stage.fn) == ("infer", "critic", None)
        if uses_critic and not _trains(pipeline, policy.name, "critic"):
            yield Contradiction(
                text=f"stage {stage.id} uses the critic for {', '.join(stage.writes)}, but no "
                f"stage trains the critic of policy {policy.name}; add one with type: train, role: "
                f"critic and reads: [turns, {', '.join(CRITIC_COLUMNS)}], or give fn",
                keys=((*at, "role"), at),
            )
