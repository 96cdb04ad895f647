# SPDX-License-Identifier: Apache-2.0
"""Rules by name: built-in ones, and custom ones as `module:Class` or from an installed package.

Owns building a rule from its name, options and state, and every reason why that fails. A built-in
rule is one file of this package that defines `RULE`; there is no list of them. Decides nothing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, cast, overload

from pydantic import ValidationError

from penstock.dataflow.rules.hooks import Admit, Curate, Mix, Replay, Route, Select
from penstock.dataflow.rules.rule import Rule, State
from penstock.errors import ConfigError
from penstock.plugins import RULE_GROUP, builtin_plugins, load_class, plugin_names, unknown
from penstock.types import Hook

METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "mix": ("pick", ("sources", "draw")),
    "curate": ("wants", ("task", "draw")),
    "admit": ("judge", ("group",)),
    "select": ("choose", ("ready", "count")),
    "replay": ("choose", ("pool", "count", "draw")),
    "route": ("sees", ("policy", "turn_policy", "role")),
}
"""The method that a rule at each hook needs, and its arguments."""

Options = Mapping[str, Any]


@cache
def builtin_rules() -> Mapping[Hook, Mapping[str, type[Rule]]]:
    """The built-in rules by hook and name."""
    rules: dict[Hook, dict[str, type[Rule]]] = {hook: {} for hook in Hook}
    for kind in builtin_plugins("penstock.dataflow.rules", "RULE").values():
        rules[kind.hook][kind.name] = kind
    return rules


@overload
def make_rule(hook: Literal["mix"], name: str, options: Options, state: State) -> Mix: ...
@overload
def make_rule(hook: Literal["curate"], name: str, options: Options, state: State) -> Curate: ...
@overload
def make_rule(hook: Literal["admit"], name: str, options: Options, state: State) -> Admit: ...
@overload
def make_rule(hook: Literal["select"], name: str, options: Options, state: State) -> Select: ...
@overload
def make_rule(hook: Literal["replay"], name: str, options: Options, state: State) -> Replay: ...
@overload
def make_rule(hook: Literal["route"], name: str, options: Options, state: State) -> Route: ...
@overload
def make_rule(hook: str, name: str, options: Options, state: State) -> Any: ...
def make_rule(hook: str, name: str, options: Options, state: State) -> Any:
    """The rule with this name, its options and its memory; ConfigError says what is wrong."""
    label = f"rule {hook}: {name}"
    kind = _find(hook, name, label)
    method, arguments = METHODS[hook]
    if not _accepts(getattr(kind, method, None), (None, *arguments), {}):
        signature = f"def {method}(self, {', '.join(arguments)})"
        raise ConfigError(f"{label}: {kind.__name__} needs `{signature}`, like every {hook} rule")
    if problem := _option_problem(kind, options):
        raise ConfigError(f"{label}: {problem}")
    rule = _build(kind, options, state, label)
    if hook == "replay":
        _check_replay(rule, label)
    return rule


def _find(hook: str, name: str, label: str) -> type[object]:
    builtin = builtin_rules()[Hook(hook)]
    if name in builtin:
        return builtin[name]
    if ":" not in name and name not in (offered := plugin_names(RULE_GROUP)):
        text = unknown(f"{hook} rule", name, (*builtin, *offered), also="module:Class")
        raise ConfigError(f"{label}: {text}")
    try:
        return load_class(name, RULE_GROUP)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error


def _build(kind: type[object], options: Options, state: State, label: str) -> object:
    try:
        if issubclass(kind, Rule):
            return kind.build(state, options)
        return cast(Callable[..., object], kind)(state, **options)
    except ValidationError as error:
        problems = [(".".join(map(str, found["loc"])), found["msg"]) for found in error.errors()]
        text = "; ".join(f"{key}: {message}" if key else message for key, message in problems)
        raise ConfigError(f"{label}: {text}") from error
    except Exception as error:
        raise ConfigError(
            f"{label}: {kind.__name__}({_format_options(options)}) raised {type(error).__name__}: "
            f"{error}; change the options or the rule"
        ) from error


def _option_problem(kind: type[object], options: Options) -> str:
    """Why this class cannot be built from a state and these options; empty if it can."""
    if issubclass(kind, Rule):
        required = {name: field.is_required() for name, field in kind.model_fields.items()}
    else:
        if _accepts(kind, (None,), options):
            return ""
        parameters = inspect.signature(kind).parameters.values()
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        required = {p.name: p.default is p.empty for p in named}
        required |= {name: False for name in options if takes_any}
    for option in options:
        if option not in required:
            return unknown("option", option, required, of=kind.__name__, none="remove it")
    for option, is_required in required.items():
        if is_required and option not in options:
            return f"{kind.__name__} needs the option {option!r}; write it next to the rule"
    if issubclass(kind, Rule):
        return ""
    return (
        f"{kind.__name__} cannot be built from a state and options; "
        "write `def __init__(self, state, *, option=default)`"
    )


def _accepts(function: object, positional: tuple[object, ...], named: Options) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*positional, **named)
    except (TypeError, ValueError):
        return False
    return True


def _check_replay(rule: object, label: str) -> None:
    """Check the three values of a custom class that the dataflow computes with."""
    values = cast(Any, rule)
    ratio = getattr(values, "ratio", None)
    uses = getattr(values, "max_uses", None)
    bound = getattr(values, "max_staleness", 0)
    if not isinstance(ratio, float | int) or not 0 < ratio < 1:
        raise ConfigError(f"{label}: ratio is {ratio!r}; set self.ratio to a value between 0 and 1")
    if not isinstance(uses, int) or uses < 2:
        raise ConfigError(f"{label}: max_uses is {uses!r}; set self.max_uses to 2 or more")
    if bound is not None and (not isinstance(bound, int) or bound < 1):
        raise ConfigError(
            f"{label}: max_staleness is {bound!r}, but a trained group is at least 1 version "
            "old; set self.max_staleness to 1 or more, or to None for the policy's bound"
        )


def _format_options(options: Options) -> str:
    return ", ".join(["state", *(f"{key}={value!r}" for key, value in options.items())])
