# SPDX-License-Identifier: Apache-2.0
"""Rules by name: the shipped ones, and a user's own as `module:Class`.

Owns building a rule from its name, options and state, and every reason why that cannot be done.
Decides nothing about data."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, MutableMapping
from difflib import get_close_matches
from typing import Any, Literal, cast, overload

from penstock.dataflow.rules.by_policy import ByPolicy
from penstock.dataflow.rules.by_role import ByRole
from penstock.dataflow.rules.curriculum import Curriculum
from penstock.dataflow.rules.dedup import Dedup
from penstock.dataflow.rules.edf import EarliestDeadline
from penstock.dataflow.rules.every_group import EveryGroup
from penstock.dataflow.rules.every_task import EveryTask
from penstock.dataflow.rules.fifo import Fifo
from penstock.dataflow.rules.freshest import Freshest
from penstock.dataflow.rules.greso import Greso
from penstock.dataflow.rules.hooks import Admit, Curate, Mix, Replay, Route, Select
from penstock.dataflow.rules.length_balanced import LengthBalanced
from penstock.dataflow.rules.newest import Newest
from penstock.dataflow.rules.outcome import Outcomes
from penstock.dataflow.rules.overlong import Overlong
from penstock.dataflow.rules.prioritised import Prioritised
from penstock.dataflow.rules.priority import Priority
from penstock.dataflow.rules.reward_range import RewardRange
from penstock.dataflow.rules.reward_spread import RewardSpread
from penstock.dataflow.rules.round_robin import RoundRobin
from penstock.dataflow.rules.shared import Shared
from penstock.dataflow.rules.solved_filter import SolvedFilter
from penstock.dataflow.rules.uniform import Uniform
from penstock.dataflow.rules.weights import Weights
from penstock.errors import ConfigError

RULES: Mapping[str, Mapping[str, type]] = {
    "mix": {"weights": Weights, "round-robin": RoundRobin, "curriculum": Curriculum},
    "curate": {"all": EveryTask, "solved-filter": SolvedFilter, "greso": Greso},
    "admit": {
        "all": EveryGroup,
        "reward-spread": RewardSpread,
        "overlong": Overlong,
        "outcome": Outcomes,
        "reward-range": RewardRange,
        "dedup": Dedup,
    },
    "select": {
        "edf": EarliestDeadline,
        "fifo": Fifo,
        "freshest": Freshest,
        "priority": Priority,
        "length-balanced": LengthBalanced,
    },
    "replay": {"newest": Newest, "uniform": Uniform, "prioritised": Prioritised},
    "route": {"by-policy": ByPolicy, "by-role": ByRole, "shared": Shared},
}
"""By hook and name."""

METHODS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "mix": ("pick", ("sources", "draw")),
    "curate": ("wants", ("task", "draw")),
    "admit": ("judge", ("group",)),
    "select": ("choose", ("ready", "count")),
    "replay": ("choose", ("pool", "count", "draw")),
    "route": ("sees", ("policy", "turn_policy", "role")),
}
"""What a rule at each hook is asked, and with what."""

Options = Mapping[str, Any]
State = MutableMapping[str, Any]


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
    """The rule of this name, with its memory. ConfigError says what does not fit and the cure."""
    label = f"rule {hook}: {name}"
    kind = _find(hook, name, label)
    method, arguments = METHODS[hook]
    if not _accepts(getattr(kind, method, None), (None, *arguments), {}):
        wanted = f"def {method}(self, {', '.join(arguments)})"
        raise ConfigError(f"{label}: {kind.__name__} has no `{wanted}`; a {hook} rule needs it")
    if problem := next(_option_errors(kind, options), None):
        raise ConfigError(f"{label}: {problem}")
    try:
        rule: object = kind(state, **options)
    except Exception as error:
        raise ConfigError(
            f"{label}: {kind.__name__}({_format_options(options)}) raised {type(error).__name__}: "
            f"{error}; change the options or the rule"
        ) from error
    if hook == "replay":
        _check_replay(rule, label)
    return rule


def _find(hook: str, name: str, label: str) -> type:
    if ":" not in name:
        shipped = RULES[hook]
        if name not in shipped:
            near = get_close_matches(name, shipped, n=1)
            fix = f'did you mean "{near[0]}"?' if near else f"use {' | '.join(shipped)}"
            raise ConfigError(f"{label}: no such rule; {fix} (or module:Class for your own)")
        return shipped[name]
    module_name, _, class_name = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(
            f"{label}: cannot import {module_name}: {type(error).__name__}: {error}; "
            "run from the folder that holds it, or install it"
        ) from error
    found: object = getattr(module, class_name, None)
    if not isinstance(found, type):
        near = get_close_matches(class_name, [n for n, v in vars(module).items() if _is_class(v)])
        fix = f'did you mean "{near[0]}"?' if near else "define the class there"
        where = getattr(module, "__file__", None) or module_name
        raise ConfigError(f"{label}: {where} has no class {class_name}; {fix}")
    return found


def _is_class(value: object) -> bool:
    return isinstance(value, type)


def _option_errors(kind: type, options: Options) -> Iterator[str]:
    """Why this class cannot be built from its state and these options."""
    parameters = [*inspect.signature(kind).parameters.values()]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if _accepts(kind, (None,), options):
        return
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in named:
                near = get_close_matches(option, named, n=1)
                known = f"known: {', '.join(named)}" if named else "it takes none; delete it"
                fix = f'did you mean "{near[0]}"?' if near else known
                yield f"{kind.__name__} has no option {option!r}; {fix}"
    for parameter in parameters:
        is_needed = parameter.kind is parameter.KEYWORD_ONLY
        if is_needed and parameter.default is parameter.empty and parameter.name not in options:
            yield f"{kind.__name__} needs the option {parameter.name!r}; write it beside the rule"
    yield (
        f"{kind.__name__} cannot be built from its state and options; "
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
    """A user's class may hold anything; the host divides and compares by these three."""
    values = cast(Any, rule)
    ratio = getattr(values, "ratio", None)
    uses = getattr(values, "max_uses", None)
    bound = getattr(values, "max_staleness", 0)
    if not isinstance(ratio, float | int) or not 0 < ratio < 1:
        raise ConfigError(f"{label}: ratio is {ratio!r}; set self.ratio between 0 and 1")
    if not isinstance(uses, int) or uses < 2:
        raise ConfigError(f"{label}: max_uses is {uses!r}; set self.max_uses to 2 or more")
    if bound is not None and (not isinstance(bound, int) or bound < 1):
        raise ConfigError(
            f"{label}: max_staleness is {bound!r}, and a group that was trained is at least 1 "
            "version old; set self.max_staleness to 1 or more, or to None for the policy's own"
        )


def _format_options(options: Options) -> str:
    return ", ".join(["state", *(f"{key}={value!r}" for key, value in options.items())])
