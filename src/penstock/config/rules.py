# SPDX-License-Identifier: Apache-2.0
"""Which rules decide: one entry per rule, the defaults, and how a policy's own rules win.

Owns how a rule is written in the file. Builds none, and imports no user code: whether a
`module:Class` is there and takes its options is asked when the service is built."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import ConfigDict, Field, ValidationError, model_serializer, model_validator

from penstock.config.base import (
    FUNCTION,
    Contradiction,
    Section,
    did_you_mean,
    nested_error,
    quoted,
    raise_contradictions,
    unknown_choice,
)
from penstock.config.rule_options import RULE_OPTIONS, Hook

SHARED_HOOKS = frozenset({Hook.MIX, Hook.CURATE})
"""They decide before any policy is known, so they cannot differ by policy."""
SINGLE_HOOKS = frozenset({Hook.MIX, Hook.SELECT, Hook.REPLAY, Hook.ROUTE})
"""They choose one thing, so two rules would contradict each other; the others chain."""

_HOOKS = tuple(hook.value for hook in Hook)


class RuleConfig(Section):
    """One rule at one hook, its options beside it: `{replay: newest, ratio: 0.3}`.

    The name is a shipped rule or `module:Class`."""

    model_config = ConfigDict(extra="allow")

    mix: str | None = None
    """Which source next? weights | round-robin | curriculum."""
    curate: str | None = None
    """Is this task worth rolling out now? all | solved-filter | greso."""
    admit: str | None = None
    """May this closed group enter? all | reward-spread | overlong | outcome | reward-range |
    dedup."""
    select: str | None = None
    """Which ready groups go into the next batch? edf | fifo | freshest | priority |
    length-balanced."""
    replay: str | None = None
    """Which served rows may be served again? newest | uniform | prioritised."""
    route: str | None = None
    """Which consumers see which turns? by-policy | by-role | shared."""

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, data: Any) -> Any:
        """Check the options against the rule's own, and write out their defaults."""
        if not isinstance(data, Mapping):
            return data
        entry = cast(Mapping[str, Any], data)
        hook = _find_hook(entry)
        name = entry[hook]
        if not isinstance(name, str) or FUNCTION.fullmatch(name):
            return entry
        options = {key: value for key, value in entry.items() if key not in _HOOKS}
        return {hook.value: name, **_resolved(hook, name, options)}

    @property
    def hook(self) -> Hook:
        """Where this rule decides."""
        return next(hook for hook in Hook if getattr(self, hook) is not None)

    @property
    def name(self) -> str:
        """Which rule it is."""
        return str(getattr(self, self.hook))

    @property
    def options(self) -> dict[str, Any]:
        """What is set beside it; of a shipped rule all that it has, defaults included."""
        return dict(self.model_extra or {})

    @property
    def is_builtin(self) -> bool:
        """Ours, so that its options are known here."""
        return ":" not in self.name

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


def _resolved(hook: Hook, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a shipped rule, complete."""
    builtin = RULE_OPTIONS[hook]
    if name not in builtin:
        text = f"{unknown_choice(name, tuple(builtin))} (module:Class for a rule of your own)"
        raise_contradictions([Contradiction(text=text, keys=((hook.value,),))])
    kind = builtin[name]
    raise_contradictions(_unknown_options(name, options, tuple(kind.model_fields)))
    try:
        return kind.model_validate(options).model_dump(mode="json")
    except ValidationError as error:
        raise nested_error(error) from None


def _unknown_options(
    name: str, options: Mapping[str, Any], known: Sequence[str]
) -> Iterator[Contradiction]:
    for option in options:
        if option in known:
            continue
        closest = did_you_mean(str(option), known)
        listed = f"it takes {', '.join(known)}" if known else "it takes none; delete this key"
        fix = f'did you mean "{closest}"?' if closest else listed
        yield Contradiction(text=f"{quoted(name)} has no such option; {fix}", keys=((option,),))


Rules = Annotated[tuple[RuleConfig, ...], Field(strict=False)]
"""Rules in the order in which they are asked."""

DEFAULT_RULES: tuple[RuleConfig, ...] = (
    RuleConfig(mix="weights"),
    RuleConfig(curate="all"),
    RuleConfig(admit="all"),
    RuleConfig(select="edf"),
    RuleConfig(route="by-policy"),
)
"""What decides at a hook for which no rule is written; nothing is served again by default."""


def rule_contradictions(rules: Sequence[RuleConfig]) -> Iterator[Contradiction]:
    """Rules written twice, and second rules at a hook that takes one."""
    for index, rule in enumerate(rules):
        earlier = rules[:index]
        if rule in earlier:
            text = f"{rule.hook}: {rule.name} stands twice; delete this entry"
        elif rule.hook in SINGLE_HOOKS and any(other.hook == rule.hook for other in earlier):
            text = f"{rule.hook} takes one rule and has one already; keep one of them"
        else:
            continue
        yield Contradiction(text=text, keys=(("rules", index), ("rules",)))


def effective_rules(*rule_lists: Sequence[RuleConfig]) -> tuple[RuleConfig, ...]:
    """The rules in force, hook by hook: of the first layer that has any, else the default."""
    in_force: list[RuleConfig] = []
    for hook in Hook:
        at_hook = ([rule for rule in layer if rule.hook == hook] for layer in rule_lists)
        defaults = [rule for rule in DEFAULT_RULES if rule.hook == hook]
        in_force += next(filter(None, at_hook), defaults)
    return tuple(in_force)
