# SPDX-License-Identifier: Apache-2.0
"""What is shipped for stages of a pipeline: which columns it writes, and its options.

Owns what may stand under `writes` and `options` of a stage that runs something of ours. Does not
know what a function does; a test holds names and defaults equal to those of the functions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from penstock.config.base import Contradiction, Section, did_you_mean, nested, one_of, refuse

CREDITS = "penstock.trainer.pipeline.credits"
"""The module of the shipped stage functions."""


class CriticOptions(Section):
    """Of a critic that learns."""

    learning_rate: float | None = Field(default=None, ge=0, lt=10)
    """Peak of its learning rate; null: five times the actor's."""


class GroupOptions(Section):
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


class StepOptions(Section):
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


class LongAnswerOptions(Section):
    """Of what becomes of answers that were too long."""

    max_length: PositiveInt
    """Tokens an answer may have, the margin included."""
    margin: PositiveInt
    """Over so many tokens before the limit the punishment grows from 0 to -1."""
    how: Annotated[Literal["mask", "punish", "both"], one_of("mask", "punish", "both")] = "both"
    """Set truncated answers aside, punish long ones, or both."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        if self.margin > self.max_length:
            text = f"the margin of {self.margin} tokens must be within the {self.max_length} that "
            refuse([Contradiction(text=f"{text}an answer may have; lower it", keys=(("margin",),))])
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
class Shipped:
    """What is known of a stage that runs something of ours."""

    writes: tuple[str, ...] = ("advantage",)
    """Exactly these columns."""
    options: type[Section] = Section
    """Names, types and bounds."""
    compares_in_group: bool = False
    """Whether a group of one gets no credit."""


FUNCTIONS: Mapping[str, Shipped] = {
    "group_advantage": Shipped(options=GroupOptions, compares_in_group=True),
    "centred_advantage": Shipped(compares_in_group=True),
    "leave_one_out_advantage": Shipped(compares_in_group=True),
    "batch_advantage": Shipped(),
    "group_then_batch_advantage": Shipped(compares_in_group=True),
    "last_turn_advantage": Shipped(compares_in_group=True),
    "discounted_advantage": Shipped(options=DiscountOptions, compares_in_group=True),
    "role_advantage": Shipped(options=RoleOptions, compares_in_group=True),
    "step_advantage": Shipped(options=StepOptions),
    "to_go_advantage": Shipped(options=KlOptions),
    "no_advantage": Shipped(),
    "less_kl_reward": Shipped(writes=("less_kl_reward",), options=KlOptions),
    "overlong": Shipped(writes=("shaped_reward", "excluded"), options=LongAnswerOptions),
    "gae": Shipped(writes=("advantage", "returns"), options=GaeOptions),
}
"""The functions of `CREDITS`."""

SHIPPED: Mapping[tuple[str, str], Shipped] = {
    ("infer", "actor"): Shipped(writes=("proximal_logprobs",)),
    ("infer", "reference"): Shipped(writes=("reference_logprobs",)),
    ("infer", "teacher"): Shipped(writes=("teacher_logprobs",)),
    ("infer", "critic"): Shipped(writes=("values",)),
    ("compute", "overlong"): FUNCTIONS["overlong"],
    ("compute", "advantage"): FUNCTIONS["group_advantage"],
    ("compute", "critic"): FUNCTIONS["gae"],
    ("train", "actor"): Shipped(writes=()),
    ("train", "critic"): Shipped(writes=(), options=CriticOptions),
}
"""By (type, role), for a stage that has no fn of its own."""


def shipped_for(type: str, role: str, fn: str | None) -> Shipped | None:
    """What such a stage runs of ours; None where the function is the user's."""
    if fn is None:
        return SHIPPED.get((type, role))
    module, _, name = fn.partition(":")
    return FUNCTIONS.get(name) if module == CREDITS else None


def require_options(shipped: Shipped, options: Mapping[str, Any]) -> None:
    """Return if they are options of it; raise what is wrong with them, each with its key."""
    refuse(_unknown_options(shipped, options))
    try:
        shipped.options.model_validate(dict(options))
    except ValidationError as error:
        raise nested(error) from None


def _unknown_options(shipped: Shipped, options: Mapping[str, Any]) -> Iterator[Contradiction]:
    known = tuple(shipped.options.model_fields)
    for option in options:
        if option in known:
            continue
        near = did_you_mean(option, known)
        cure = f'did you mean "{near}"?' if near else "take it out, or give a fn of your own"
        listed = ", ".join(known) or "none"
        text = f"{option} is no option of what is shipped for it ({listed}); {cure}"
        yield Contradiction(text=text, keys=((option,), ()))
