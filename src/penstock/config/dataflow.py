# SPDX-License-Identifier: Apache-2.0
"""Settings of the dataflow service: store, leases, closing of groups, rules.

Owns which rules and closings exist. Does not know what a rule does, and builds none."""

import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PositiveInt,
    Tag,
    model_serializer,
    model_validator,
)

from penstock.config.checks import Contradiction, Section, not_one_of, one_of, refuse, shown


class Hook(StrEnum):
    """The point of a row's life at which a rule decides."""

    MIX = "mix"
    """Which source next?"""
    CURATE = "curate"
    """Is this task worth rolling out now?"""
    ADMIT = "admit"
    """May this closed group enter?"""
    SELECT = "select"
    """Which ready groups go into the next batch?"""
    REPLAY = "replay"
    """Which served rows may be served again?"""
    ROUTE = "route"
    """Which consumers see which turns?"""


SHARED_HOOKS = frozenset({Hook.MIX, Hook.CURATE})
"""They decide before any policy is known, so they cannot differ by policy."""
SINGLE_HOOKS = frozenset({Hook.MIX, Hook.SELECT})
"""They choose one thing, so two rules would contradict each other; the others chain."""


def _not_yet(hook: str) -> BeforeValidator:
    def check(value: object) -> object:
        if value is not None:
            raise ValueError(f"no {hook} rule is served yet; leave {hook} out")
        return value

    return BeforeValidator(check)


class RuleConfig(Section):
    """One rule at one hook, written as a mapping of a single key: `{admit: reward-spread}`."""

    mix: Annotated[
        Literal["weights"] | None, one_of("weights", later=("round-robin", "curriculum"))
    ] = None
    """Which source next?"""
    curate: Annotated[
        Literal["all"] | None, one_of("all", later=("solved-filter", "greso", "GRESO"))
    ] = None
    """Is this task worth rolling out now?"""
    admit: Annotated[
        Literal["all", "reward-spread"] | None,
        one_of("all", "reward-spread", later=("overlong", "outcome", "reward-range", "dedup")),
    ] = None
    """May this closed group enter? `reward-spread` drops groups of equal rewards."""
    select: Annotated[
        Literal["edf", "fifo"] | None,
        one_of("edf", "fifo", later=("freshest", "priority", "length-balanced")),
    ] = None
    """Which ready groups go into the next batch? Earliest deadline first, or first in first out."""
    replay: Annotated[None, _not_yet("replay")] = None
    """Which served rows may be served again? No rule is served yet."""
    route: Annotated[None, _not_yet("route")] = None
    """Which consumers see which turns? No rule is served yet."""

    @model_validator(mode="after")
    def _has_one_key(self) -> Self:
        named = [hook for hook in Hook if getattr(self, hook) is not None]
        if len(named) != 1:
            given = ", ".join(named) or "none"
            raise ValueError(
                f"a rule names exactly one hook, here {given}; write one entry per rule, "
                "like [{admit: all}, {select: edf}]"
            )
        return self

    @property
    def hook(self) -> Hook:
        """Where this rule decides."""
        return next(hook for hook in Hook if getattr(self, hook) is not None)

    @property
    def name(self) -> str:
        """Which rule it is."""
        return str(getattr(self, self.hook))

    @model_serializer
    def _as_single_key(self) -> dict[str, str]:
        return {self.hook.value: self.name}


Rules = Annotated[tuple[RuleConfig, ...], Field(strict=False)]
"""Rules in the order in which they are asked."""

DEFAULT_RULES: tuple[RuleConfig, ...] = (
    RuleConfig(mix="weights"),
    RuleConfig(curate="all"),
    RuleConfig(admit="all"),
    RuleConfig(select="edf"),
)
"""What decides at a hook for which no rule is written."""


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


def layered(own: Sequence[RuleConfig], shared: Sequence[RuleConfig]) -> tuple[RuleConfig, ...]:
    """The rules in force, hook by hook: the policy's own, else the shared, else the default."""
    layers = (own, shared, DEFAULT_RULES)
    in_force: list[RuleConfig] = []
    for hook in Hook:
        at_hook = [[rule for rule in layer if rule.hook == hook] for layer in layers]
        in_force += at_hook[0] or at_hook[1] or at_hook[2]
    return tuple(in_force)


class LeaseConfig(Section):
    """How long work may be held."""

    ttl_s: float = Field(default=12.0, gt=0)
    """Seconds a node may hold a slot without a heartbeat."""
    max_attempts: PositiveInt = 3
    """Attempts at one slot before it ends as failed."""
    start_to_close_s: float = Field(default=600.0, gt=0)
    """Seconds one attempt may run before it is truncated."""


class SurvivorsConfig(Section):
    """When a group with failed members still counts."""

    min: int = Field(ge=2)
    """Fewest good members with which a group is kept (two, or there is nothing to compare)."""


class SurvivorsClosing(Section):
    """Keep a group whose failed members are few, comparing those that are left."""

    survivors: SurvivorsConfig
    """Written `{survivors: {min: 4}}` or, shorter, `survivors(4)`."""


_SURVIVORS_CALL = re.compile(r"survivors\(\s*(?:min\s*=\s*)?([0-9]{1,9})\s*\)")


def _read_closing(value: object) -> object:
    if not isinstance(value, str):
        return value
    if match := _SURVIVORS_CALL.fullmatch(value):
        return {"survivors": {"min": int(match[1])}}
    if value in ("complete", "drop"):
        return value
    raise not_one_of(value, ("complete", "drop", "survivors(4)"))


def _closing_kind(value: object) -> str:
    return "<mapping>" if isinstance(value, Mapping | SurvivorsClosing) else "<word>"


ClosingConfig = Annotated[
    Annotated[Literal["complete", "drop"], Tag("<word>")]
    | Annotated[SurvivorsClosing, Tag("<mapping>")],
    Discriminator(_closing_kind),
    BeforeValidator(_read_closing),
]
"""What becomes of a group when all its slots are terminal; `<…>` tags never reach a message."""


def _read_store(value: object) -> object:
    if value == "sqlite":
        return value
    if isinstance(value, str) and value.startswith("postgres"):
        raise ValueError(f"{shown(value)} is not served yet; use sqlite")
    raise not_one_of(value, ("sqlite",))


class DataflowConfig(Section):
    """The dataflow service of a run."""

    store: Annotated[Literal["sqlite"], BeforeValidator(_read_store)] = "sqlite"
    """Where the ledger's metadata lives."""
    lease: LeaseConfig = LeaseConfig()
    """How long work may be held."""
    closing: ClosingConfig = "complete"
    """What becomes of a group whose slots are all terminal: complete | drop | survivors(min)."""
    rules: Rules = ()
    """Data decisions; a hook without a rule has its default."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        refuse(rule_contradictions(self.rules))
        return self


class PolicyDataflowConfig(Section):
    """What of the dataflow may differ by policy."""

    rules: Rules = ()
    """Win over the shared rules, hook by hook."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        refuse([*rule_contradictions(self.rules), *self._misplaced()])
        return self

    def _misplaced(self) -> Iterator[Contradiction]:
        for index, rule in enumerate(self.rules):
            if rule.hook in SHARED_HOOKS:
                yield Contradiction(
                    text=f"{rule.hook} decides before any policy is known; "
                    "move this entry to dataflow.rules",
                    keys=(("rules", index), ("rules",)),
                )
