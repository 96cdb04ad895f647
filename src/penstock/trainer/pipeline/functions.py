# SPDX-License-Identifier: Apache-2.0
"""Which function a stage runs, and whether its signature fits the stage.

    compute, infer   fn(layout, *, <column it reads>…, <option>…) -> Mapping of columns
    infer, placed    fn(trajectory, *, <column it reads>…, <option>…) -> Mapping of columns
    train            fn(tokens, *, <option>…) -> TokenLoss

`turns` is the content of the first argument, so it is not a keyword. Imports the user's module and
inspects the signature; calls nothing, and imports no torch itself. Options of built-in functions
were checked when the file was read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_origin

from penstock.config.builtin_stages import default_functions
from penstock.config.pipeline import PipelineStageConfig
from penstock.config.stages import function_group
from penstock.errors import ConfigError
from penstock.plugins import load_function

Function = Callable[..., Any]
_NAMED = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def function_name(stage: PipelineStageConfig) -> str | None:
    """The name of its function; None if the trainer runs a model."""
    return stage.fn or default_functions().get((stage.type, stage.role))


def find_function(stage: PipelineStageConfig) -> Function | None:
    """The function that the stage runs; ConfigError if it is missing or does not fit."""
    name = function_name(stage)
    if name is None:
        return None
    try:
        function = load_function(name, function_group(stage.type))
    except ConfigError as error:
        raise ConfigError(f"stage {stage.id}: {error}") from error.__cause__
    if found := list(signature_errors(stage, function)):
        raise ConfigError(f"stage {stage.id}: {name}: {'; '.join(found)}")
    return function


def keywords(stage: PipelineStageConfig) -> dict[str, str]:
    """Columns passed to fn, by keyword."""
    if stage.type == "train":
        return {}
    return {stage.rename.get(column, column): column for column in stage.reads if column != "turns"}


def signature_errors(stage: PipelineStageConfig, function: Function) -> Iterator[str]:
    """Why this function does not fit the stage."""
    signature = _signature(function)
    if signature is None:
        return
    parameters = [*signature.parameters.values()]
    first, named = parameters[:1], {p.name: p for p in parameters[1:] if p.kind in _NAMED}
    subject = "tokens" if stage.type == "train" else "layout"
    subject = "trajectory" if stage.is_service else subject
    if not first or first[0].kind is inspect.Parameter.KEYWORD_ONLY:
        yield f"takes no {subject}; write it as fn({subject}, *, …)"
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    given = {**dict.fromkeys(keywords(stage), "column"), **dict.fromkeys(stage.options, "option")}
    fixes = {"column": "rename or drop the column", "option": "remove the option"}
    for name, kind in given.items():
        if name not in named and not takes_any:
            yield f"has no keyword {name} for the {kind} of that name; add it, or {fixes[kind]}"
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given:
            yield f"needs {name}, which the stage neither reads nor gives as an option; add either"
    if stage.type != "train" and not _gives_mapping(signature.return_annotation):
        yield "is not annotated to return columns; write -> Mapping[str, …]"


def _signature(function: Function) -> inspect.Signature | None:
    """None if Python cannot inspect it (some compiled functions)."""
    try:
        return inspect.signature(function, eval_str=True)
    except (NameError, AttributeError, TypeError, SyntaxError):  # names for type checkers only
        return inspect.signature(function)
    except ValueError:
        return None


def _gives_mapping(annotation: Any) -> bool:
    if isinstance(annotation, str):
        return annotation.rpartition(".")[2].startswith(("Mapping", "dict", "Dict", "Columns"))
    kind = get_origin(annotation) or annotation
    return isinstance(kind, type) and issubclass(kind, Mapping)
