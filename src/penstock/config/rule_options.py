# SPDX-License-Identifier: Apache-2.0
"""Options of every shipped rule: names, types, bounds and defaults.

Owns what may be written beside a rule's name. Does not know what a rule does; a test holds the
names and defaults equal to those of the rules themselves."""

from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from penstock.config.base import Contradiction, Section, non_empty, one_of, raise_contradictions


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


Share = Annotated[float, Field(gt=0, lt=1)]
"""Strictly between nothing and all."""


class NoOptions(Section):
    """A rule that is its name and nothing else."""


class CurriculumOptions(Section):
    """mix: sources are picked by weight · (p (1 − p) + floor), p their success."""

    decay: float = Field(default=0.9, ge=0, lt=1)
    """How much of p stays when a group is judged."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """What a source that always or never succeeds keeps."""
    difficulty: Mapping[str, str | int] | None = None
    """Level of each source; sources of one level share p. Null: each source for itself."""


class SolvedFilterOptions(Section):
    """curate: tasks that nearly always succeed are revisited only now and then."""

    solved_at: float = Field(default=0.95, gt=0, le=1)
    """Moving average of the mean reward from which a task counts as solved."""
    decay: float = Field(default=0.9, ge=0, lt=1)
    """How much of the average stays when a group is judged."""
    revisit: float = Field(default=0.05, gt=0, le=1)
    """Chance of a solved task; above 0, or a solved source would never give a task again."""


class GresoOptions(Section):
    """curate: a task is submitted with probability max(floor, p^z), z its uniform groups so far."""

    p: Share = 0.5
    """Where p starts."""
    delta: Share = 0.01
    """How far p moves in one version."""
    p_min: Share = 0.01
    """Least p."""
    p_max: Share = 0.99
    """Greatest p."""
    alpha_easy: Share = 0.083
    """Share of uniform easy groups from which p of easy tasks falls."""
    alpha_hard: Share = 0.167
    """Share of uniform hard groups from which p of hard tasks falls."""
    floor_easy: float = Field(default=0.05, gt=0, le=1)
    """Least chance of an easy task."""
    floor_hard: float = Field(default=0.3, gt=0, le=1)
    """Least chance of a hard task."""
    easy_from: float = 0.5
    """Uniform reward from which a group is easy."""
    hard_to: float = 0.5
    """Uniform reward up to which a group that is not easy is hard."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        raise_contradictions(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Contradiction]:
        if not self.p_min <= self.p <= self.p_max:
            yield Contradiction(
                text=f"p {self.p} lies outside p_min {self.p_min} to p_max {self.p_max}; "
                "set p_min <= p <= p_max",
                keys=(("p",), ("p_min",), ("p_max",)),
            )
        if self.hard_to > self.easy_from:
            yield Contradiction(
                text=f"hard_to {self.hard_to} is above easy_from {self.easy_from}; "
                "set hard_to <= easy_from",
                keys=(("hard_to",), ("easy_from",)),
            )


class RewardSpreadOptions(Section):
    """admit: groups of one reward are refused."""

    same_reward: float = Field(default=1e-6, ge=0)
    """Rewards that differ by no more are equal."""


class OverlongOptions(Section):
    """admit: groups with too many truncated answers are refused."""

    max_share: float = Field(default=0.5, ge=0, lt=1)
    """Greatest share of truncated members."""


class OutcomeOptions(Section):
    """admit: every member must have ended in one of these ways."""

    allow: Annotated[
        tuple[Annotated[Literal["completed", "truncated"], one_of("completed", "truncated")], ...],
        Field(strict=False),
        non_empty(),
    ] = ("completed",)
    """Outcomes that may enter."""


class RewardRangeOptions(Section):
    """admit: the mean reward must lie within bounds, themselves included."""

    low: float | None = None
    """Least mean reward; null for no bound."""
    high: float | None = None
    """Greatest mean reward; null for no bound."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        raise_contradictions(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.low is None and self.high is None:
            text = "neither low nor high is set, so nothing is refused; set one of them"
        elif self.low is not None and self.high is not None and self.low > self.high:
            text = f"low {self.low} is above high {self.high}; set low <= high"
        else:
            return
        yield Contradiction(text=text, keys=(("low",), ("high",), ()))


class DedupOptions(Section):
    """admit: a task that was admitted not long ago is refused."""

    window: PositiveInt = 1000
    """How many admitted groups are remembered."""


class PriorityOptions(Section):
    """select: the most instructive groups first."""

    by: Annotated[Literal["spread", "middle"], one_of("spread", "middle")] = "spread"
    """Largest deviation of rewards first, or mean reward nearest to 0.5 first."""


class LengthBalancedOptions(Section):
    """select: earliest deadlines, ordered so that parts of the batch carry equal tokens."""

    parts: int = Field(default=8, ge=1, le=4096)
    """Into how many parts the batch is cut: the trainer's minibatches, or a multiple of them."""


def _replay_bound(value: object) -> object:
    if value == 0 and not isinstance(value, bool):
        raise ValueError(
            "0 would let nothing be served again, for a trained group is at least 1 version old; "
            "set max_staleness >= 1, or null for the policy's own"
        )
    return value


class ReplayOptions(Section):
    """replay: part of each batch is served again."""

    ratio: Share = 0.3
    """Share of a batch, in groups, rounded down."""
    max_uses: int = Field(default=4, ge=2)
    """Batches one group may be in, its first one included."""
    max_staleness: Annotated[PositiveInt | None, BeforeValidator(_replay_bound)] = None
    """Versions that what is served again may be behind; null for the policy's own bound."""


class PrioritisedOptions(ReplayOptions):
    """replay: drawn with probability ∝ (mean |reward − group mean| + epsilon)^alpha."""

    alpha: float = Field(default=0.6, ge=0, le=10)
    """0 draws evenly, 1 in proportion."""
    epsilon: float = Field(default=1e-3, gt=0)
    """What a group of equal rewards keeps."""


Names = Annotated[tuple[str, ...], Field(strict=False), non_empty()]


class ByRoleOptions(Section):
    """route: a policy's trainer sees its own turns in these roles."""

    roles: Annotated[Mapping[str, Names], non_empty()]
    """Roles by policy; a policy that is left out sees all of its own turns."""


class SharedOptions(Section):
    """route: a policy's trainer sees the turns of these policies."""

    turns_of: Annotated[Mapping[str, Names], non_empty()]
    """Sampling policies by trained policy; one that is left out sees its own turns."""


RULE_OPTIONS: Mapping[Hook, Mapping[str, type[Section]]] = {
    Hook.MIX: {"weights": NoOptions, "round-robin": NoOptions, "curriculum": CurriculumOptions},
    Hook.CURATE: {"all": NoOptions, "solved-filter": SolvedFilterOptions, "greso": GresoOptions},
    Hook.ADMIT: {
        "all": NoOptions,
        "reward-spread": RewardSpreadOptions,
        "overlong": OverlongOptions,
        "outcome": OutcomeOptions,
        "reward-range": RewardRangeOptions,
        "dedup": DedupOptions,
    },
    Hook.SELECT: {
        "edf": NoOptions,
        "fifo": NoOptions,
        "freshest": NoOptions,
        "priority": PriorityOptions,
        "length-balanced": LengthBalancedOptions,
    },
    Hook.REPLAY: {
        "newest": ReplayOptions,
        "uniform": ReplayOptions,
        "prioritised": PrioritisedOptions,
    },
    Hook.ROUTE: {"by-policy": NoOptions, "by-role": ByRoleOptions, "shared": SharedOptions},
}
"""The shipped rules, hook by hook."""
