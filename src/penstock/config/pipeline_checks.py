# SPDX-License-Identifier: Apache-2.0
"""Contradictions between the stages of a pipeline.

Owns the checks that need only the stages. Columns from elsewhere, policies and stages that work on
rows are checked in `pipeline_cross_checks`, options of built-in stages in `builtin_stages`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.config.builtin_stages import SCORING_SERVICES, builtin_stage_for, builtin_stages
from penstock.config.stage_graph import (
    Edge,
    cycles,
    draw_path,
    duplicate_ids,
    duplicate_writers,
    unknown_after,
)
from penstock.config.stages import INITIAL_COLUMNS, PipelineStageConfig
from penstock.options import Contradiction, KeyPath

BATCH_COLUMNS = (*INITIAL_COLUMNS, "length", "truncated", "sampling_logprobs")
"""Columns of every batch: also the number of sampled tokens of each row, whether it was truncated,
and the engine's log-prob of each token."""

TRAINED_ROLES = ("actor", "critic")
"""Roles whose weights a trainer changes, so no other process has them."""

ADVANTAGE_COLUMN = "advantage"
"""The column that every actor needs, whatever its loss."""

CRITIC_COLUMNS = ("values", "returns")
"""Columns that the built-in loss of a critic compares."""


def pipeline_contradictions(stages: Sequence[PipelineStageConfig]) -> Iterator[Contradiction]:
    """What cannot work whatever the rest of the file says."""
    repeated = [problem.at(("stages", problem.index)) for problem in duplicate_ids(stages)]
    if repeated:
        yield from repeated
        return
    for index, stage in enumerate(stages):
        yield from _check_stage(("stages", index), stage)
    for problem in unknown_after(stages):
        yield problem.at(("stages", problem.index))
    found: dict[Contradiction, None] = {}
    for policy in {stage.policy: None for stage in stages if stage.policy} or (None,):
        seen = {i: stage for i, stage in enumerate(stages) if stage.policy in (None, policy)}
        found |= dict.fromkeys(_check_policy_stages(seen))
    yield from found


def _check_stage(at: KeyPath, stage: PipelineStageConfig) -> Iterator[Contradiction]:
    """One stage by itself."""
    wrong = (
        *_kind_problems(stage),
        *_name_problems(stage),
        *_missing_columns_for_loss(stage),
        *(_service_problems(stage) if stage.is_service else _ineffective_settings(stage)),
    )
    for key, text in wrong:
        yield Contradiction(text=f"stage {stage.id}: {text}", keys=((*at, key), at))


def _kind_problems(stage: PipelineStageConfig) -> Iterator[tuple[str, str]]:
    kind = (stage.type, stage.role)
    if stage.type == "train" and stage.writes:
        yield "writes", "a train stage writes no column; remove writes"
    if stage.type != "train" and not stage.writes:
        yield "writes", f"{stage.type} stages must write at least one column; name it"
    if stage.type == "train" and stage.role not in TRAINED_ROLES:
        yield "role", f"a train stage has the role {' or '.join(TRAINED_ROLES)}; choose one"
    if stage.fn is None and kind not in builtin_stages() and not stage.is_service:
        roles = ", ".join(role for type_, role in builtin_stages() if type_ == stage.type)
        fix = f"give fn: module:function, or one of the roles {roles}"
        if stage.type == "infer" and stage.role in SCORING_SERVICES:
            fix = "it runs as a service: give place and model; or give fn: module:function"
        yield "role", f"there is no built-in for type {stage.type} and role {stage.role}; {fix}"
    builtin = builtin_stage_for(stage.type, stage.role, stage.fn)
    is_writer = builtin and stage.writes and stage.type != "train"
    if builtin and is_writer and {*stage.writes} != {*builtin.writes}:
        own, given = ", ".join(builtin.writes), ", ".join(stage.writes)
        fix = f"set writes: [{own}], or give a custom fn"
        yield "writes", f"the built-in for it writes {own}, not {given}; {fix}"


def _name_problems(stage: PipelineStageConfig) -> Iterator[tuple[str, str]]:
    for column in stage.rename:
        if column not in stage.reads:
            yield "rename", f"{column} is renamed but not read; add it to reads"
    names = [stage.rename.get(column, column) for column in stage.reads]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield "rename", f"two columns are passed as {name}; rename one of them"
        if name in stage.options:
            yield "options", f"{name} is both a column it reads and an option; rename the option"


def _missing_columns_for_loss(stage: PipelineStageConfig) -> Iterator[tuple[str, str]]:
    """Columns that a model cannot learn without."""
    if stage.type == "train" and stage.role == "actor" and ADVANTAGE_COLUMN not in stage.reads:
        yield "reads", missing_column_text("an actor learns from", ADVANTAGE_COLUMN)
    if stage.type == "train" and stage.role == "critic" and stage.fn is None:
        for column in CRITIC_COLUMNS:
            if column not in stage.reads:
                yield "reads", missing_column_text("a critic learns from", column)


def missing_column_text(why: str, column: str) -> str:
    """The message for a stage that does not read a column it needs."""
    type_, role = next(kind for kind, ours in builtin_stages().items() if column in ours.writes)
    fix = f"if no stage writes it, add one with type: {type_} and role: {role}"
    return f"{why} {column}, which it does not read; add it to reads; {fix}"


def _ineffective_settings(stage: PipelineStageConfig) -> Iterator[tuple[str, str]]:
    """Settings that have no effect on a stage inside the trainer."""
    runs_model = stage.type == "train" or (stage.type == "infer" and stage.fn is None)
    if stage.model is not None and (found := _ignored_model(stage, runs_model)):
        why, fix = found
        yield "model", f"{why}, so model has no effect; {fix}"
    if stage.parallel.num_ranks > 1 and not runs_model:
        text = "it runs a function on each rank's rows, and no model"
        yield "parallel", f"{text}, so parallel has no effect; remove it"
    if stage.rename and runs_model:
        text = "models and losses take columns by their own names"
        yield "rename", f"{text}, so rename has no effect; use these names"
    if stage.on != "delivered":
        text = "it works on complete batches"
        yield "on", f"{text}, so on has no effect; remove it, or set place"


def _ignored_model(stage: PipelineStageConfig, runs_model: bool) -> tuple[str, str] | None:
    """(reason, fix) if it does not run the model it names."""
    if stage.type == "compute":
        return "compute stages run no model", "remove it"
    if not runs_model:
        return "it runs fn, which loads its own model", "remove it, or make it an option"
    if stage.role == "actor":
        return "the actor is the policy itself", "set models.<policy>.init instead"
    if (stage.type, stage.role) == ("infer", "critic"):
        return "the critic is the one being trained", "write it at the stage that trains it"
    return None


def _service_problems(stage: PipelineStageConfig) -> Iterator[tuple[str, str]]:
    """Why it cannot run as a service."""
    if stage.type != "infer":
        why = {
            "compute": "compute stages need complete groups, and a service gets single rows",
            "train": "the model it trains is in the trainer",
        }[stage.type]
        yield "place", f"{why}; leave place null"
    elif stage.role in TRAINED_ROLES:
        text = f"the {stage.role}'s weights change with every batch, in the trainer only"
        yield "place", f"{text}; leave place null"
    elif stage.fn is None and stage.role not in SCORING_SERVICES:
        yield "fn", "a service runs a function row by row; give fn: module:function"
    elif stage.fn is None and stage.model is None:
        what = "the folder of `penstock prm train`" if stage.role == "prm" else "a reward model"
        text = f"a service with role {stage.role} runs a function or a model row by row"
        yield "model", f"{text}; give model: {what}, or fn: module:function"
    elif stage.fn is None and stage.reads != ("turns",):
        yield "reads", f"the built-in for role {stage.role} reads turns only; set reads: [turns]"
    if stage.policy is not None:
        yield "policy", "a service works on rows of all policies; leave policy null"
    if stage.after:
        yield "after", "a service waits only for columns; remove after"


def _check_policy_stages(seen: dict[int, PipelineStageConfig]) -> Iterator[Contradiction]:
    """Stages of one policy."""
    stages, indices = tuple(seen.values()), tuple(seen)
    for problem in (*duplicate_writers(stages), *cycles(stages)):
        yield problem.at(("stages", indices[problem.index]))
    yield from _rewritten_batch_columns(seen)
    yield from _service_reads(seen)
    yield from _duplicate_train_stages(seen)


def _rewritten_batch_columns(seen: dict[int, PipelineStageConfig]) -> Iterator[Contradiction]:
    for index, stage in seen.items():
        for position, column in enumerate(stage.writes):
            if column in BATCH_COLUMNS and not (column == "reward" and stage.is_service):
                fix = ", or set place so that a service scores rows" * (column == "reward")
                at: KeyPath = ("stages", index, "writes")
                yield Contradiction(
                    text=f"stage {stage.id} writes {column}, which every batch already has; "
                    f"use another name, like shaped_{column}{fix}",
                    keys=((*at, position), at),
                )


def _service_reads(seen: dict[int, PipelineStageConfig]) -> Iterator[Contradiction]:
    """A service reads the ledger, never columns from inside the trainer."""
    inside = {
        column: stage.id
        for stage in seen.values()
        if not stage.is_service
        for column in stage.writes
    }
    for index, stage in seen.items():
        for position, column in enumerate(stage.reads):
            if stage.is_service and column in inside:
                edge = Edge(source=inside[column], target=stage.id, columns=(column,))
                at: KeyPath = ("stages", index, "reads")
                yield Contradiction(
                    text=f"stage {stage.id} is a service and reads {column}, which stage "
                    f"{inside[column]} writes inside the trainer: {draw_path((edge,))}; set place "
                    "for both, or for neither",
                    keys=((*at, position), at),
                )


def _duplicate_train_stages(seen: dict[int, PipelineStageConfig]) -> Iterator[Contradiction]:
    first: dict[str, str] = {}
    for index, stage in seen.items():
        if stage.type != "train":
            continue
        if stage.role in first:
            yield Contradiction(
                text=f"stages {first[stage.role]} and {stage.id} both train the {stage.role}; "
                "a batch makes one version: keep one of them",
                keys=(("stages", index, "role"), ("stages", index)),
            )
        first.setdefault(stage.role, stage.id)
