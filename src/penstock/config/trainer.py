# SPDX-License-Identifier: Apache-2.0
"""Settings of learning: sampling, algorithm, training.

Owns their defaults and the contradictions inside each. Does not know policies, sources or storage,
and builds nothing."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from penstock.config.algorithms import Algorithm, builtin_algorithms, with_preset
from penstock.config.base import (
    Contradiction,
    Section,
    one_of,
    quoted,
    raise_contradictions,
    unknown_choice,
)
from penstock.config.pipeline import ParallelConfig

STALENESS_BY_MODE: Mapping[str, int] = {"sync": 0, "one_step": 1, "async": 8}
"""`max_staleness` of each mode; of async only where the file gives none."""


def _temperature(value: object) -> object:
    if value == 0 and not isinstance(value, bool):
        raise ValueError(
            "with 0 all members of a group would be the same answer; set temperature > 0"
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


class CorrectionConfig(Section):
    """Correction for tokens on which trainer and engine disagree. ρ is the trainer's
    probability of a token at the start of the step over the engine's."""

    weighting: Annotated[
        Literal["truncate", "mask", "none"], one_of("truncate", "mask", "none")
    ] = "truncate"
    """truncate (TIS) weighs a token's loss by ρ, at most by high; mask (IcePop) weighs it by ρ and
    rejects tokens outside low and high; none does not weigh tokens."""
    low: float = Field(default=0.0, ge=0)
    """Lower bound of a token's ρ under mask."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound of a token's ρ."""
    sequence: Annotated[Literal["sum", "geometric"], one_of("sum", "geometric")] | None = None
    """Also reject sequences by their ρ: the product over their tokens (sum of logarithms), or its
    geometric mean, which needs bounds near 1."""
    sequence_low: float = Field(default=0.0, ge=0)
    """Lower bound of a sequence's ρ."""
    sequence_high: float | None = Field(default=None, gt=0)
    """Upper bound of a sequence's ρ; null for none."""
    veto: float = Field(default=0.0, ge=0, lt=1)
    """Reject a sequence that has a token with a ρ below this; 1e-4 is usual, 0 is off."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        raise_contradictions(self._contradictions())
        return self

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.low >= self.high:
            text = f"low {self.low} is not below high {self.high}, so no token is left; lower it"
            yield Contradiction(text=text, keys=(("low",), ("high",)))
        if self.low > 0 and self.weighting != "mask":
            text = f"low has no effect with weighting {self.weighting}; remove it, or use mask"
            yield Contradiction(text=text, keys=(("low",), ("weighting",)))
        if self.weighting == "none":
            yield from self._ineffective_keys()
        is_bounded = self.sequence_low > 0 or self.sequence_high is not None
        if is_bounded != (self.sequence is not None):
            text = "sequence and its bounds belong together; set sequence_low or sequence_high "
            yield Contradiction(text=f"{text}with sequence, or none of them", keys=(("sequence",),))
        if self.sequence_high is not None and self.sequence_low >= self.sequence_high:
            text = "sequence_low is not below sequence_high, so no sequence is left; lower it"
            yield Contradiction(text=text, keys=(("sequence_low",), ("sequence_high",)))

    def _ineffective_keys(self) -> Iterator[Contradiction]:
        """Keys without effect if tokens are not weighed."""
        if self.high != type(self).model_fields["high"].default:
            text = "high has no effect with weighting none; remove it, or use truncate or mask"
            yield Contradiction(text=text, keys=(("high",), ("weighting",)))
        if self.sequence is None and not self.veto:
            yield Contradiction(
                text="weighting none by itself corrects nothing, and costs a forward pass; set "
                "sequence with its bounds, or veto, or remove correction",
                keys=(("weighting",),),
            )


def _algorithm_name(value: object) -> object:
    names = tuple(builtin_algorithms())
    if not isinstance(value, str) or value not in names:
        raise unknown_choice(value, names)
    return value


class AlgorithmConfig(Section):
    """The loss and its advantage, under TRL's names."""

    name: Annotated[str, BeforeValidator(_algorithm_name)] = "grpo"
    """The algorithm: its graph of stages, and the defaults of the other keys (`penstock plan` shows
    both). reinforce compares the rows of a batch, ppo has a critic, opd a teacher; all others
    compare the members of a group."""
    num_generations: PositiveInt = 8
    """Trajectories per group: how often each task is attempted."""
    epsilon: float = Field(default=0.2, gt=0, le=1)
    """Clips the probability ratio below at 1 - epsilon."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Clips the ratio above at 1 + epsilon_high; the same as epsilon when null."""
    delta: float | None = Field(default=None, gt=1)
    """Upper bound of the ratio also for negative advantages (two-sided clipping, 3 is usual); null
    leaves it unbounded, and a stale unlikely token may then outweigh a batch."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus in the loss."""
    beta: float = Field(default=0.0, ge=0)
    """Weight of the divergence (k3) from a reference model; 0.0 needs none. 1e-3 for ppo, m2po and
    rloo."""
    aggregation: Annotated[
        Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-constant"],
        one_of("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-constant"),
    ] = "token-mean"
    """What the sum over tokens is divided by: all trained tokens, each sequence's tokens and then
    the number of sequences, only the number of sequences, or that times sampling.max_tokens."""
    tau: float | None = Field(default=None, gt=0)
    """M2PO's budget: largest mean squared log-ratio of harmful tokens. 0.01 for m2po; 0.002 is
    usual from 14 B parameters on."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of later rewards, from one trained token to the next; ppo only."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation; ppo only."""
    teacher: str | None = None
    """Model that opd distils: `builtin:NAME`, or a folder in Hugging Face form."""
    ratio_against: Annotated[Literal["sampling", "proximal"], one_of("sampling", "proximal")] = (
        "sampling"
    )
    """The denominator of the loss's ratio: the log-probs recorded by the engine at sampling, or the
    trainer's own at the start of the step, which costs a forward pass."""
    correction: CorrectionConfig | None = None
    """For engines whose log-probs differ from the trainer's; null trusts them."""

    @property
    def declaration(self) -> Algorithm:
        """What the algorithm of this name declares."""
        return builtin_algorithms()[self.name]

    @property
    def is_group_relative(self) -> bool:
        """Whether a group of one has no learning signal, under the algorithm's own graph."""
        return self.declaration.is_group_relative

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads the trainer's log-probs at the start of the step."""
        is_set = self.ratio_against == "proximal" or self.correction is not None
        return is_set or self.declaration.needs_proximal

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        return with_preset(data)

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        raise_contradictions(
            [*self._contradictions(), *self._misplaced(), *self._double_correction()]
        )
        return self

    def _double_correction(self) -> Iterator[Contradiction]:
        """A ratio to the engine's log-probs includes the mismatch already."""
        takes_ratio = "ratio_against" in self.declaration.keys
        if not takes_ratio and self.ratio_against == "proximal":
            text = f"{self.name} fixes what its ratio is against; remove ratio_against"
            yield Contradiction(text=text, keys=(("ratio_against",), ("name",)))
        if self.correction is None:
            return
        if "correction" not in self.declaration.keys:
            text = f"{self.name} bounds the ratio to the engine's log-probs itself"
            text = f"{text}; remove correction"
            yield Contradiction(text=text, keys=(("correction",), ("name",)))
        elif self.correction.weighting != "none" and (
            self.ratio_against == "sampling" or not takes_ratio
        ):
            fix = "set ratio_against: proximal, or " if takes_ratio else ""
            text = "the loss's ratio to the engine's log-probs corrects the mismatch already; it "
            yield Contradiction(
                text=f"{text}would count twice; {fix}only reject tokens (weighting: none)",
                keys=(("correction", "weighting"), ("ratio_against",)),
            )

    def _misplaced(self) -> Iterator[Contradiction]:
        """Keys that this algorithm does not take, and those it requires."""
        declared = self.declaration
        for key in ("tau", "teacher", "gamma", "lam"):
            if key not in declared.keys and not self._is_default(key):
                owners = [name for name, one in builtin_algorithms().items() if key in one.keys]
                owner = " or ".join(owners)
                text = f"{key} belongs to {owner}, and the algorithm is {self.name}; remove it"
                yield Contradiction(text=f"{text}, or set name: {owner}", keys=((key,), ("name",)))
        for key in declared.required:
            if getattr(self, key) is None:
                yield Contradiction(
                    text=f"{self.name} needs {key}; set it", keys=((key,), ("name",))
                )
        if self.delta is not None and "delta" not in declared.keys:
            text = f"delta belongs to the clipped loss, and {self.name} has another; remove it"
            yield Contradiction(text=text, keys=(("delta",), ("name",)))
        for key in ("epsilon", "epsilon_high"):
            if key not in declared.keys and not self._is_default(key):
                default = quoted(type(self).model_fields[key].default)
                text = f"{key} clips a ratio, and {self.name} has {declared.instead_of_clip}"
                text = f"{text}; remove it, or set it to {default}"
                yield Contradiction(text=text, keys=((key,), ("name",)))
        if declared.check is not None:
            yield from declared.check(self)

    def _is_default(self, key: str) -> bool:
        return getattr(self, key) == type(self).model_fields[key].default

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.epsilon_high is not None and self.epsilon_high < self.epsilon:
            is_preset = self.declaration.preset.get("epsilon_high") == self.epsilon_high
            whose = f", the default of {self.name}," if is_preset else ""
            yield Contradiction(
                text=f"epsilon_high {self.epsilon_high}{whose} is below epsilon {self.epsilon}; "
                "set epsilon_high >= epsilon, or epsilon_high: null to clip evenly",
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
    """AdamW's peak learning rate; 0 changes nothing, which is a useful control."""
    lr_scheduler_type: Annotated[
        Literal["constant", "linear", "cosine"], one_of("constant", "linear", "cosine")
    ] = "constant"
    """The learning rate after its peak: constant, or falling to 0 after the last step."""
    warmup_steps: NonNegativeInt = 0
    """Steps in which the learning rate rises evenly to its peak."""
    groups_per_batch: PositiveInt = 64
    """Groups sealed into one batch."""
    minibatches: PositiveInt = 1
    """Parts a batch is cut into; one optimizer update each."""
    epochs: PositiveInt = 1
    """Passes over a batch."""
    mode: Annotated[
        Literal["sync", "one_step", "async"] | None, one_of("sync", "one_step", "async")
    ] = None
    """Pacing by name: sync is max_staleness 0, one_step 1, async 8 or the value of max_staleness;
    null: the value of max_staleness."""
    max_staleness: NonNegativeInt = 1
    """Versions a row may be older than the one it trains; 0 is fully synchronous."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks of the trainer under the algorithm's own graph; stages of a pipeline have their own."""
    checkpoint_every: PositiveInt = 20
    """Steps between two checkpoints."""
    weight_decay: float = Field(default=0.01, ge=0, lt=10)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    precision: Annotated[Literal["float32", "bfloat16"], one_of("float32", "bfloat16")] = "float32"
    """Of activations; weights and optimizer stay in float32. bfloat16 is faster where the processor
    has instructions for it, and on others slower."""
    micro_batch_tokens: PositiveInt = 4096
    """Most tokens in one forward pass, or one longer sample; affects memory, not the gradient."""

    @model_validator(mode="before")
    @classmethod
    def _apply_mode(cls, data: Any) -> Any:
        """Write out the values of the mode."""
        if not isinstance(data, Mapping):
            return data
        written = cast(Mapping[str, Any], data)
        mode = written.get("mode")
        if not isinstance(mode, str) or mode not in STALENESS_BY_MODE:
            return written
        return {"max_staleness": STALENESS_BY_MODE[mode], **written}

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        raise_contradictions(self._contradictions())
        return self

    @property
    def _matches_mode(self) -> bool:
        if self.mode == "async":
            return self.max_staleness >= 1
        return self.mode is None or self.max_staleness == STALENESS_BY_MODE[self.mode]

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.mode is not None and not self._matches_mode:
            expected = ">= 1" if self.mode == "async" else str(STALENESS_BY_MODE[self.mode])
            yield Contradiction(
                text=f"mode {self.mode} means max_staleness {expected}, not {self.max_staleness}; "
                "remove one of the two",
                keys=(("max_staleness",), ("mode",)),
            )
        if self.minibatches > self.groups_per_batch:
            yield Contradiction(
                text=f"{self.groups_per_batch} groups cannot be cut into {self.minibatches} "
                f"minibatches; set minibatches <= {self.groups_per_batch} "
                f"or groups_per_batch >= {self.minibatches}",
                keys=(("minibatches",), ("groups_per_batch",)),
            )
        if self.warmup_steps > self.steps:
            yield Contradiction(
                text=f"{self.warmup_steps} warmup_steps do not fit into {self.steps} steps, so the "
                f"learning rate would never reach its peak; set warmup_steps <= {self.steps}",
                keys=(("warmup_steps",), ("steps",)),
            )
