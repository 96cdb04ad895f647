# SPDX-License-Identifier: Apache-2.0
"""Rules in the run file: one entry per rule, the defaults, and how a policy's rules take priority.

Owns the syntax of an entry. A built-in rule declares its own options; they are found at run time.
Builds no rule and imports no user code: a custom rule and its options are checked when the service
is built."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field, model_serializer, model_validator

from penstock.config.base import Section, is_custom
from penstock.options import Contradiction, Options, parse_options, raise_contradictions
from penstock.plugins import RULE_GROUP, did_you_mean, load_function, plugin_names, unknown
from penstock.types import Hook

SHARED_HOOKS = frozenset({Hook.MIX, Hook.CURATE})
"""Hooks that decide before a policy is known, so they cannot differ by policy."""
SINGLE_HOOKS = frozenset({Hook.MIX, Hook.SELECT, Hook.REPLAY, Hook.ROUTE})
"""Hooks that take one rule, because they choose one thing; the others chain."""

_HOOKS = tuple(hook.value for hook in Hook)


class RuleConfig(Section):
    """One rule at one hook, with its options: `{replay: newest, ratio: 0.3}`.

    The name is a built-in rule, one that an installed package offers, or `module:Class`."""

    model_config = ConfigDict(extra="allow")

    mix: str | None = None
    """Which source next?"""
    curate: str | None = None
    """Is this task worth rolling out now?"""
    admit: str | None = None
    """May this closed group enter?"""
    select: str | None = None
    """Which ready groups go into the next batch?"""
    replay: str | None = None
    """Which trained groups may be trained again?"""
    route: str | None = None
    """Which consumers see which turns?"""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Check the options against the rule's declaration, and write out their defaults."""
        if not isinstance(data, Mapping):
            return data
        entry = cast(Mapping[str, Any], data)
        hook = _find_hook(entry)
        name = entry[hook]
        if not isinstance(name, str) or _is_custom(hook, name):
            return entry
        options = {key: value for key, value in entry.items() if key not in _HOOKS}
        return {hook.value: name, **_complete_options(hook, name, options)}

    @property
    def hook(self) -> Hook:
        """Where it decides."""
        return next(hook for hook in Hook if getattr(self, hook) is not None)

    @property
    def name(self) -> str:
        """The name of the rule."""
        return str(getattr(self, self.hook))

    @property
    def options(self) -> dict[str, Any]:
        """Its options; for a built-in rule all of them, defaults included."""
        return dict(self.model_extra or {})

    @property
    def is_builtin(self) -> bool:
        """Whether its options are declared in penstock."""
        return not _is_custom(self.hook, self.name)

    @model_serializer
    def _as_entry(self) -> dict[str, Any]:
        return {self.hook.value: self.name, **self.options}


def _find_hook(entry: Mapping[str, Any]) -> Hook:
    named = [hook for hook in Hook if entry.get(hook) is not None]
    if len(named) == 1:
        return named[0]
    if not named:
        closest = {key: did_you_mean(str(key), _HOOKS) for key in entry if key not in _HOOKS}
        raise_contradictions(
            Contradiction(text=f'unknown key; did you mean "{hook}"?', keys=((key,),))
            for key, hook in closest.items()
            if hook
        )
    given = ", ".join(named) or "none"
    raise ValueError(
        f"a rule names exactly one hook, here {given}; write one entry per rule, "
        "like [{admit: all}, {select: edf}]"
    )


def _is_custom(hook: Hook, name: str) -> bool:
    return name not in builtin_rules()[hook] and is_custom(name, RULE_GROUP)


def _complete_options(hook: Hook, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of a built-in rule, defaults included."""
    builtin = builtin_rules()[hook]
    if name not in builtin:
        known = (*builtin, *plugin_names(RULE_GROUP))
        text = unknown(f"{hook} rule", name, known, also="module:Class")
        raise_contradictions([Contradiction(text=text, keys=((hook.value,),))])
    return parse_options(builtin[name], name, options).model_dump(mode="json")


def builtin_rules() -> Mapping[Hook, Mapping[str, type[Options]]]:
    """The built-in rules by hook and name, as the options they take.

    The rules live in a layer above config, so they are found by name."""
    return load_function("penstock.dataflow.rules:builtin_rules")()


Rules = Annotated[tuple[RuleConfig, ...], Field(strict=False)]
"""Rules in the order in which they decide."""

DEFAULT_RULES: tuple[RuleConfig, ...] = (
    RuleConfig(mix="weights"),
    RuleConfig(curate="all"),
    RuleConfig(admit="all"),
    RuleConfig(select="edf"),
    RuleConfig(route="by-policy"),
)
"""The rule of each hook for which the file has none; nothing is replayed by default."""


def rule_contradictions(rules: Sequence[RuleConfig]) -> Iterator[Contradiction]:
    """Duplicate rules, and second rules at a hook that takes one."""
    for index, rule in enumerate(rules):
        earlier = rules[:index]
        if rule in earlier:
            text = f"{rule.hook}: {rule.name} is duplicated; delete this entry"
        elif rule.hook in SINGLE_HOOKS and any(other.hook == rule.hook for other in earlier):
            text = f"{rule.hook} takes one rule and already has one; keep one of them"
        else:
            continue
        yield Contradiction(text=text, keys=(("rules", index), ("rules",)))


def effective_rules(*rule_lists: Sequence[RuleConfig]) -> tuple[RuleConfig, ...]:
    """The effective rules, hook by hook: from the first list that has any, else the default."""
    effective: list[RuleConfig] = []
    for hook in Hook:
        at_hook = ([rule for rule in rules if rule.hook == hook] for rules in rule_lists)
        defaults = [rule for rule in DEFAULT_RULES if rule.hook == hook]
        effective += next(filter(None, at_hook), defaults)
    return tuple(effective)
