# SPDX-License-Identifier: Apache-2.0
"""The section `algorithm` of a run file, and what an algorithm declares: its loss, its graph of
stages, its defaults and the keys it takes.

Each built-in algorithm is one module of `BUILTIN_PACKAGE` whose `ALGORITHM` is such a declaration;
the module's name is the algorithm's. To add one, add one file. Such a module imports no torch at
module level, so that a run file can be checked without it.

Owns the form of a declaration, how its values complete a run file, and the keys with their bounds.
Common to all, and the general defaults: AdamW 0.9/0.999 with weight decay 0.01,
gradients clipped to 1.0, no warm-up, 8 samples per task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from penstock.config.base import Section
from penstock.config.builtin_stages import STAGE_FUNCTIONS_MODULE
from penstock.config.rules import RuleConfig
from penstock.options import Contradiction, unknown_choice
from penstock.plugins import builtin_plugins, quoted

BUILTIN_PACKAGE = "penstock.trainer.algorithms"
"""The package that holds the built-in algorithms, one module each."""

StageEntry = dict[str, Any]
"""A stage as a run file writes it under `pipeline.stages`."""

CLIP_KEYS = frozenset({"epsilon", "epsilon_high"})
"""Keys of a loss that clips a ratio."""
CLIPPED_LOSS_KEYS = CLIP_KEYS | {"delta", "ratio_against", "correction"}
"""Keys of PPO's clipped loss."""


def stage_entry(
    id: str, type: str, role: str, reads: list[str], writes: list[str], **more: Any
) -> StageEntry:
    """One stage of a built-in graph."""
    return {"id": id, "type": type, "role": role, "reads": reads, "writes": writes, **more}


def advantage_entry(function: str | None = None, reads: str = "reward") -> StageEntry:
    """The stage that writes advantages: GRPO's, or the built-in stage function of this name."""
    fn = function and f"{STAGE_FUNCTIONS_MODULE}:{function}"
    return stage_entry("advantage", "compute", "advantage", [reads], ["advantage"], fn=fn)


def train_entry(*more_reads: str) -> StageEntry:
    """The stage that trains the actor."""
    return stage_entry("train", "train", "actor", ["turns", "advantage", *more_reads], [])


def group_stages(algorithm: AlgorithmConfig, max_tokens: int) -> list[StageEntry]:
    """Compare the members of each group as GRPO does, then train."""
    return [advantage_entry(), train_entry()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The declaration of one algorithm."""

    loss: Callable[[AlgorithmConfig], Any]
    """Builds its loss: an `Objective` or `BudgetedObjective` (`penstock.trainer.losses.tokens`)."""
    stages: Callable[[AlgorithmConfig, int], list[StageEntry]] = group_stages
    """Its graph, given `sampling.max_tokens`. Stages for a reference (`beta` above 0) and for
    proximal log-probs are added in front of it where the loss reads them."""
    keys: frozenset[str] = CLIPPED_LOSS_KEYS
    """Keys of `algorithm` it takes, of those that not every algorithm takes."""
    required: tuple[str, ...] = ()
    """Keys that must not be null."""
    preset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Defaults of `algorithm` that differ from the general ones."""
    minibatches: int = 4
    """Default of `training.minibatches`; lower if a batch has fewer groups."""
    rules: tuple[RuleConfig, ...] = ()
    """Defaults of `dataflow.rules`, in place of the hook's general default."""
    is_group_relative: bool = True
    """Whether a group of one has no learning signal."""
    has_ratio_bounds: bool = False
    """Whether a token's ratio to its sampling log-prob loses its gradient outside the clip."""
    needs_proximal: bool = False
    """Whether the loss always reads the trainer's log-probs at the start of the step."""
    needs_advantage: bool = True
    """Whether a batch without any advantage has no learning signal."""
    loss_reads: tuple[str, ...] = ()
    """Further token columns that the loss reads."""
    instead_of_clip: str = "no clip"
    """For messages: what a loss without `epsilon` has in place of the clip."""
    check: Callable[[AlgorithmConfig], Iterator[Contradiction]] | None = None
    """Contradictions that only this algorithm has."""


def builtin_algorithms() -> Mapping[str, Algorithm]:
    """All built-in algorithms, by name."""
    return builtin_plugins(BUILTIN_PACKAGE, "ALGORITHM")


def with_minibatches(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run file as written, its shared training completed by the algorithm's default."""
    completed = dict(run)
    algorithm, training = run.get("algorithm"), run.get("training")
    if not isinstance(algorithm, Mapping) or not isinstance(training, Mapping):
        return completed
    written = cast(Mapping[str, Any], training)
    declared = _declared(cast(Mapping[str, Any], algorithm))
    groups = written.get("groups_per_batch", 64)
    if declared and isinstance(groups, int) and groups > 0:
        completed["training"] = {"minibatches": min(declared.minibatches, groups), **written}
    return completed


def _declared(algorithm: Mapping[str, Any]) -> Algorithm | None:
    name = algorithm.get("name", "grpo")
    return builtin_algorithms().get(name) if isinstance(name, str) else None


class CorrectionConfig(Section):
    """Correction for tokens on which trainer and engine disagree. ρ is the trainer's
    probability of a token at the start of the step over the engine's."""

    weighting: Literal["truncate", "mask", "none"] = "truncate"
    """truncate (TIS) weighs a token's loss by ρ, at most by high; mask (IcePop) weighs it by ρ and
    rejects tokens outside low and high; none does not weigh tokens."""
    low: float = Field(default=0.0, ge=0)
    """Lower bound of a token's ρ under mask."""
    high: float = Field(default=2.0, gt=0)
    """Upper bound of a token's ρ."""
    sequence: Literal["sum", "geometric"] | None = None
    """Also reject sequences by their ρ: the product over their tokens (sum of logarithms), or its
    geometric mean, which needs bounds near 1."""
    sequence_low: float = Field(default=0.0, ge=0)
    """Lower bound of a sequence's ρ."""
    sequence_high: float | None = Field(default=None, gt=0)
    """Upper bound of a sequence's ρ; null for none."""
    veto: float = Field(default=0.0, ge=0, lt=1)
    """Reject a sequence that has a token with a ρ below this; 1e-4 is usual, 0 is off."""

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
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "fixed-constant"
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
    agents: Literal["parent", "siblings"] = "parent"
    """What the reward of a sub-agent is compared with: parent takes the baseline of the workflow
    that began the tree (the group's other rows), siblings the agents with the same parent."""
    teacher: str | None = None
    """Model that opd distils: a model of the Hub, a folder or `builtin:NAME`, as `init`."""
    ratio_against: Literal["sampling", "proximal"] = "sampling"
    """The denominator of the loss's ratio: the log-probs recorded by the engine at sampling, or the
    trainer's own at the start of the step, which costs a forward pass."""
    correction: CorrectionConfig | None = None
    """For engines whose log-probs differ from the trainer's; null trusts them."""

    @property
    def declaration(self) -> Algorithm:
        """What the algorithm of this name declares."""
        return builtin_algorithms()[self.name]

    @property
    def needs_proximal(self) -> bool:
        """Whether the loss reads the trainer's log-probs at the start of the step."""
        is_set = self.ratio_against == "proximal" or self.correction is not None
        return is_set or self.declaration.needs_proximal

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        """Complete the section by the defaults of its name."""
        if not isinstance(data, Mapping):
            return data
        written = cast(Mapping[str, Any], data)
        declared = _declared(written)
        return {**declared.preset, **written} if declared else written

    def _contradictions(self) -> Iterator[Contradiction]:
        yield from self._impossible_bounds()
        yield from self._misplaced()
        yield from self._double_correction()

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
        if self.agents == "siblings" and not declared.is_group_relative:
            text = (
                f"agents: siblings compares inside a group, which {self.name} does not; remove it"
            )
            yield Contradiction(text=text, keys=(("agents",), ("name",)))
        if declared.check is not None:
            yield from declared.check(self)

    def _is_default(self, key: str) -> bool:
        return getattr(self, key) == type(self).model_fields[key].default

    def _impossible_bounds(self) -> Iterator[Contradiction]:
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
