# SPDX-License-Identifier: Apache-2.0
"""Built-in stages: the columns they write, each with its axis, and their options.

A stage function declares itself once, with the decorator `stage_function` and its signature:

    @stage_function(writes={"advantage": Axis.TOKEN}, is_group_relative=True)
    def group_advantage(
        layout: Layout, *, reward: RowValues, std_ddof: Annotated[int, Field(ge=0, le=1)] = 1
    ) -> Columns: ...

Keywords annotated with an axis (`RowValues`, `TokenValues` of `trainer.pipeline.layout`) are the
columns it reads; all others are options, with their types, bounds and defaults. Built-in functions
are the modules of `BUILTIN_PACKAGE`, found by the plug-in loader: to add one, add one file. They
import no torch, so that a run file can be checked without it. User functions may carry the same
decorator. This module calls no stage function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, TypeVar, get_args, get_origin

from pydantic import ConfigDict, Field, PositiveInt, create_model

from penstock.config.base import Section
from penstock.options import Contradiction, parse_options, raise_contradictions
from penstock.plugins import builtin_plugins, suggest

STAGE_FUNCTIONS_MODULE = "penstock.trainer.pipeline.credits"
"""The module under which run files name the built-in stage functions."""
BUILTIN_PACKAGE = "penstock.trainer.stage_functions"
"""The package that holds them, one module each."""

Check = Callable[[Mapping[str, Any]], Iterator[Contradiction]]
F = TypeVar("F", bound=Callable[..., Any])


class Axis(StrEnum):
    """What a column has one number for."""

    ROW = "row"
    """Each row of the batch, on every rank."""
    TOKEN = "token"
    """Each token of the rows that this rank holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinStage:
    """The declaration of a stage: what it reads, writes and accepts."""

    writes: Mapping[str, Axis]
    """Exactly these columns."""
    reads: Mapping[str, Axis] = field(default_factory=dict[str, Axis])
    """Axis of each column that the function takes by keyword."""
    extra_reads: Axis | None = None
    """Axis of any further column (`**columns`); None if there can be none."""
    options: type[Section] = Section
    """Names, types, bounds and defaults."""
    check: Check | None = None
    """Contradictions between valid options."""
    is_group_relative: bool = False
    """Whether a group of one gets no credit."""
    is_by_group: bool = False
    """Whether what it writes for a group depends on that group only, so that it can run before the
    batch is complete (`training.stream`)."""
    default_role: str | None = None
    """A compute stage with this role and no fn runs this function."""


class FunctionOptions(Section):
    """Base of the options that a function's signature declares."""

    model_config = ConfigDict(arbitrary_types_allowed=True)


class CriticOptions(Section):
    """Options of a train stage with role critic."""

    learning_rate: float | None = Field(default=None, ge=0, lt=10)
    """Peak learning rate; null: five times the actor's."""


class RewardModelOptions(Section):
    """Options of a placed infer stage with role reward and no fn."""

    max_tokens: PositiveInt = 4096
    """The model sees at most the last tokens of a conversation, this many."""


MODEL_STAGES: Mapping[tuple[str, str], BuiltinStage] = {
    ("infer", "actor"): BuiltinStage(writes={"proximal_logprobs": Axis.TOKEN}),
    ("infer", "reference"): BuiltinStage(writes={"reference_logprobs": Axis.TOKEN}),
    ("infer", "teacher"): BuiltinStage(writes={"teacher_logprobs": Axis.TOKEN}),
    ("infer", "critic"): BuiltinStage(writes={"values": Axis.TOKEN}),
    ("train", "actor"): BuiltinStage(writes={}),
    ("train", "critic"): BuiltinStage(writes={}, options=CriticOptions),
}
"""By (type, role): stages that run a model of the trainer, without fn."""

SCORING_SERVICES: Mapping[str, BuiltinStage] = {
    "prm": BuiltinStage(writes={"step_scores": Axis.TOKEN}),
    "reward": BuiltinStage(writes={"reward": Axis.ROW}, options=RewardModelOptions),
}
"""By role: infer stages with `place` and `model`, without fn. A process reward model scores steps,
a sequence classification model whole trajectories."""


def stage_function(
    *,
    writes: Mapping[str, Axis],
    is_group_relative: bool = False,
    is_by_group: bool = False,
    default_role: str | None = None,
    check: Check | None = None,
) -> Callable[[F], F]:
    """Declare the decorated function as a stage; its signature gives columns and options."""

    def declare(function: F) -> F:
        given = {"writes": writes, "is_group_relative": is_group_relative}
        given |= {"is_by_group": is_by_group, "default_role": default_role, "check": check}
        vars(function)["stage_declaration"] = given
        return function

    return declare


@cache
def declaration_of(function: Callable[..., Any]) -> BuiltinStage | None:
    """What the function declares; None if it has no `stage_function` decorator."""
    given = getattr(function, "stage_declaration", None)
    if given is None:
        return None
    reads: dict[str, Axis] = {}
    extra_reads: Axis | None = None
    options: dict[str, Any] = {}
    _, *keywords = inspect.signature(function, eval_str=True).parameters.values()
    for parameter in keywords:
        axis = _axis_of(parameter.annotation)
        if parameter.kind is parameter.VAR_KEYWORD:
            extra_reads = axis
        elif axis is not None:
            reads[parameter.name] = axis
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            options[parameter.name] = (parameter.annotation, default)
    name = getattr(function, "__name__", "stage")
    return BuiltinStage(
        reads=reads,
        extra_reads=extra_reads,
        options=create_model(f"Options_{name}", __base__=FunctionOptions, **options),
        **given,
    )


def _axis_of(annotation: Any) -> Axis | None:
    """The axis of a column's annotation, optional or not; None for an option."""
    if get_origin(annotation) is not Annotated:
        return next((axis for part in get_args(annotation) if (axis := _axis_of(part))), None)
    return next((mark for mark in annotation.__metadata__ if isinstance(mark, Axis)), None)


@cache
def builtin_functions() -> Mapping[str, BuiltinStage]:
    """Declarations of all built-in stage functions, by name."""
    found: dict[str, BuiltinStage] = {}
    for name, function in builtin_plugins(BUILTIN_PACKAGE, "STAGE").items():
        declaration = declaration_of(function)
        assert declaration is not None, f"{name} has no stage_function decorator"
        found[name] = declaration
    return found


@cache
def builtin_stages() -> Mapping[tuple[str, str], BuiltinStage]:
    """Stages that need no fn, by (type, role); of two that write a column, the simpler is first."""
    declared = sorted(builtin_functions().values(), key=lambda stage: len(stage.writes))
    functions = {
        ("compute", stage.default_role): stage
        for stage in declared
        if stage.default_role is not None
    }
    return {**MODEL_STAGES, **functions}


@cache
def default_functions() -> Mapping[tuple[str, str], str]:
    """The `module:function` of stages without fn, by (type, role); models are not in it."""
    return {
        ("compute", stage.default_role): f"{STAGE_FUNCTIONS_MODULE}:{name}"
        for name, stage in builtin_functions().items()
        if stage.default_role is not None
    }


def builtin_stage_for(type: str, role: str, fn: str | None) -> BuiltinStage | None:
    """The built-in that such a stage runs; None if the function is the user's."""
    if fn is None:
        service = SCORING_SERVICES.get(role) if type == "infer" else None
        return builtin_stages().get((type, role), service)
    module, _, name = fn.partition(":")
    return builtin_functions().get(name) if module == STAGE_FUNCTIONS_MODULE else None


def known_axis(column: str) -> Axis | None:
    """The axis of a column that built-ins write or losses read; None for any other name."""
    if column.endswith("_logprobs"):
        return Axis.TOKEN
    declared = [*builtin_functions().values(), *MODEL_STAGES.values(), *SCORING_SERVICES.values()]
    return next((stage.writes[column] for stage in declared if column in stage.writes), None)


def check_options(builtin: BuiltinStage, options: Mapping[str, Any]) -> None:
    """Raise every problem of these options, each with its key."""
    raise_contradictions(_unknown_options(builtin, options))
    valid = parse_options(builtin.options, "the built-in stage", options)
    if builtin.check is not None:
        raise_contradictions(builtin.check(valid.model_dump()))


def _unknown_options(builtin: BuiltinStage, options: Mapping[str, Any]) -> Iterator[Contradiction]:
    known = tuple(builtin.options.model_fields)
    for option in options:
        if option in known:
            continue
        fix = suggest(option, known, "remove it, or give your own fn")
        listed = ", ".join(known) or "none"
        text = f"{option} is not an option of the built-in stage ({listed}); {fix}"
        yield Contradiction(text=text, keys=((option,), ()))
