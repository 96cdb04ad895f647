# SPDX-License-Identifier: Apache-2.0
"""What is shipped for stages of a pipeline: which columns it writes, and its options.

Owns what may stand under `writes` and `options` of a stage that runs something of ours. Does not
know what a function does; a test holds names and defaults equal to those of the functions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from penstock.config.base import (
    Contradiction,
    Section,
    did_you_mean,
    nested_error,
    one_of,
    raise_contradictions,
)

STAGE_FUNCTIONS_MODULE = "penstock.trainer.pipeline.credits"
"""The module of the shipped stage functions."""


class CriticOptions(Section):
    """Of a critic that learns."""

    learning_rate: float | None = Field(default=None, ge=0, lt=10)
    """Peak of its learning rate; null: five times the actor's."""


class GroupAdvantageOptions(Section):
    """Of the comparison inside groups."""

    std_ddof: int = Field(default=1, ge=0, le=1)
    """1 is the unbiased std, 0 the population's."""


class DiscountOptions(Section):
    """Of credit that falls from turn to turn."""

    discount: float = Field(ge=0, le=1)
    """What a turn gets of the next one's credit."""


class RoleOptions(Section):
    """Of the comparison of each role with itself."""

    leave_one_out: bool = False
    """Against the mean of the others, as RLOO; false: as GRPO."""


class StepScoreOptions(Section):
    """Of outcome and scores of steps together."""

    how: Annotated[
        Literal["weighted", "return", "shaping", "min", "outcome"],
        one_of("weighted", "return", "shaping", "min", "outcome"),
    ] = "weighted"
    """How they become one return for each turn."""
    share: float = Field(default=0.5, ge=0)
    """Weight of the outcome."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """Of what comes a turn later."""
    by_depth: bool = False
    """Compare only turns that are as deep."""


class KlOptions(Section):
    """Of a distance to the reference inside the reward."""

    coef: float = Field(ge=0)
    """Its weight."""


class OverlongPenaltyOptions(Section):
    """Of what becomes of answers that were too long."""

    max_length: PositiveInt
    """Tokens an answer may have, the margin included."""
    margin: PositiveInt
    """Over so many tokens before the limit the punishment grows from 0 to -1."""
    how: Annotated[Literal["mask", "punish", "both"], one_of("mask", "punish", "both")] = "both"
    """Set truncated answers aside, punish long ones, or both."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.margin > self.max_length:
            text = f"the margin of {self.margin} tokens must be within the {self.max_length} that "
            raise_contradictions(
                [Contradiction(text=f"{text}an answer may have; lower it", keys=(("margin",),))]
            )
        return self


class GaeOptions(Section):
    """Of advantages through a critic's values."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """1 takes whole returns, 0 the next value only."""
    normalise: bool = False
    """Over the batch's mean and spread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinStage:
    """What is known of a stage that runs something of ours."""

    writes: tuple[str, ...] = ("advantage",)
    """Exactly these columns."""
    options: type[Section] = Section
    """Names, types and bounds."""
    is_group_relative: bool = False
    """Whether a group of one gets no credit."""


BUILTIN_FUNCTIONS: Mapping[str, BuiltinStage] = {
    "group_advantage": BuiltinStage(options=GroupAdvantageOptions, is_group_relative=True),
    "centred_advantage": BuiltinStage(is_group_relative=True),
    "leave_one_out_advantage": BuiltinStage(is_group_relative=True),
    "batch_advantage": BuiltinStage(),
    "group_then_batch_advantage": BuiltinStage(is_group_relative=True),
    "last_turn_advantage": BuiltinStage(is_group_relative=True),
    "discounted_advantage": BuiltinStage(options=DiscountOptions, is_group_relative=True),
    "role_advantage": BuiltinStage(options=RoleOptions, is_group_relative=True),
    "step_advantage": BuiltinStage(options=StepScoreOptions),
    "to_go_advantage": BuiltinStage(options=KlOptions),
    "no_advantage": BuiltinStage(),
    "less_kl_reward": BuiltinStage(writes=("less_kl_reward",), options=KlOptions),
    "overlong": BuiltinStage(writes=("shaped_reward", "excluded"), options=OverlongPenaltyOptions),
    "gae": BuiltinStage(writes=("advantage", "returns"), options=GaeOptions),
}
"""The functions of `STAGE_FUNCTIONS_MODULE`."""

BUILTIN_STAGES: Mapping[tuple[str, str], BuiltinStage] = {
    ("infer", "actor"): BuiltinStage(writes=("proximal_logprobs",)),
    ("infer", "reference"): BuiltinStage(writes=("reference_logprobs",)),
    ("infer", "teacher"): BuiltinStage(writes=("teacher_logprobs",)),
    ("infer", "critic"): BuiltinStage(writes=("values",)),
    ("compute", "overlong"): BUILTIN_FUNCTIONS["overlong"],
    ("compute", "advantage"): BUILTIN_FUNCTIONS["group_advantage"],
    ("compute", "critic"): BUILTIN_FUNCTIONS["gae"],
    ("train", "actor"): BuiltinStage(writes=()),
    ("train", "critic"): BuiltinStage(writes=(), options=CriticOptions),
}
"""By (type, role), for a stage that has no fn of its own."""


def builtin_stage_for(type: str, role: str, fn: str | None) -> BuiltinStage | None:
    """What such a stage runs of ours; None where the function is the user's."""
    if fn is None:
        return BUILTIN_STAGES.get((type, role))
    module, _, name = fn.partition(":")
    return BUILTIN_FUNCTIONS.get(name) if module == STAGE_FUNCTIONS_MODULE else None


def check_options(builtin: BuiltinStage, options: Mapping[str, Any]) -> None:
    """Return if they are options of it; raise what is wrong with them, each with its key."""
    raise_contradictions(_unknown_options(builtin, options))
    try:
        builtin.options.model_validate(dict(options))
    except ValidationError as error:
        raise nested_error(error) from None


def _unknown_options(builtin: BuiltinStage, options: Mapping[str, Any]) -> Iterator[Contradiction]:
    known = tuple(builtin.options.model_fields)
    for option in options:
        if option in known:
            continue
        closest = did_you_mean(option, known)
        fix = f'did you mean "{closest}"?' if closest else "take it out, or give a fn of your own"
        listed = ", ".join(known) or "none"
        text = f"{option} is no option of what is shipped for it ({listed}); {fix}"
        yield Contradiction(text=text, keys=((option,), ()))
