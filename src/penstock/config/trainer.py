# SPDX-License-Identifier: Apache-2.0
"""Settings of learning: sampling, algorithm, training.

Owns their defaults and the contradictions inside each. Knows nothing of policies, sources or
storage, and builds nothing."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from penstock.config.checks import Contradiction, Section, one_of, refuse, shown


def _temperature(value: object) -> object:
    if value == 0 and not isinstance(value, bool):
        raise ValueError(
            "0 would make every member of a group the same answer; set temperature > 0"
        )
    return value


def _beta(value: object) -> object:
    if isinstance(value, int | float) and value > 0:
        raise ValueError(
            f"{shown(value)} is not served yet (it needs a reference model); set beta to 0.0"
        )
    return value


class SamplingConfig(Section):
    """How engines turn logits into tokens; recorded log-probs are under exactly this."""

    temperature: Annotated[float, BeforeValidator(_temperature)] = Field(default=1.0, gt=0, le=100)
    """Divides the logits; 1.0 samples from the policy itself."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens with this share of the probability; 1.0 keeps all."""
    top_k: NonNegativeInt = 0
    """Keep this many likeliest tokens; 0 keeps all."""
    max_tokens: PositiveInt = 256
    """Most tokens sampled in one turn."""


class AlgorithmConfig(Section):
    """The loss and its advantage, under TRL's names."""

    name: Annotated[Literal["grpo", "reinforce"], one_of("grpo", "reinforce")] = "grpo"
    """The algorithm: grpo compares the members of a group, reinforce the rows of a batch."""
    num_generations: PositiveInt = 8
    """Trajectories per group: how often each task is attempted."""
    epsilon: float = Field(default=0.2, gt=0, lt=1)
    """Clips the probability ratio below at 1 - epsilon."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Clips the ratio above at 1 + epsilon_high; the same as epsilon when null."""
    delta: float | None = Field(default=None, gt=1)
    """Bounds the ratio above also where the advantage is negative (two-sided clipping, 3 is usual);
    null leaves it unbounded, and a stale unlikely token may then outweigh a whole batch."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    beta: Annotated[float, BeforeValidator(_beta)] = Field(default=0.0, ge=0)
    """Weight of the divergence from a reference model; only 0.0 is served yet."""

    @property
    def compares_in_group(self) -> bool:
        """Whether a group of one teaches nothing."""
        return self.name == "grpo"

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        refuse(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.compares_in_group and self.num_generations < 2:
            yield Contradiction(
                text=f"{self.name} compares the members of a group, and a group of "
                f"{self.num_generations} has none to compare; set num_generations >= 2",
                keys=(("num_generations",),),
            )
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            yield Contradiction(
                text=f"epsilon_high {self.epsilon_high} is below epsilon {self.epsilon}; "
                "set epsilon_high >= epsilon, or leave it out to clip evenly",
                keys=(("epsilon_high",), ("epsilon",)),
            )
        if self.delta is not None and self.delta < 1 + (self.epsilon_high or self.epsilon):
            yield Contradiction(
                text=f"delta {self.delta} is below 1 + epsilon_high, so it would cut what the clip "
                "allows; set delta >= 1 + epsilon_high, such as 3.0",
                keys=(("delta",),),
            )


class TrainingConfig(Section):
    """How batches become versions."""

    steps: PositiveInt
    """Batches to train on; the run is finished after the last."""
    learning_rate: float = Field(default=1e-6, ge=0, lt=10)
    """AdamW's learning rate; 0 trains nothing, which is a useful control."""
    groups_per_batch: PositiveInt = 64
    """Groups sealed into one batch."""
    minibatches: PositiveInt = 1
    """Parts a batch is cut into; one optimizer update each."""
    epochs: PositiveInt = 1
    """Passes over a batch."""
    max_staleness: NonNegativeInt = 1
    """Versions a row may be behind the one it trains; 0 is fully synchronous."""
    checkpoint_every: PositiveInt = 20
    """Steps between two checkpoints."""
    weight_decay: float = Field(default=0.01, ge=0, lt=10)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""

    @model_validator(mode="after")
    def _is_consistent(self) -> Self:
        refuse(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.minibatches > self.groups_per_batch:
            yield Contradiction(
                text=f"{self.groups_per_batch} groups cannot be cut into {self.minibatches} "
                f"minibatches; set minibatches <= {self.groups_per_batch} "
                f"or groups_per_batch >= {self.minibatches}",
                keys=(("minibatches",), ("groups_per_batch",)),
            )
