# SPDX-License-Identifier: Apache-2.0
"""What an algorithm declares: its loss, its graph of stages, its defaults and the keys it takes.

Each built-in algorithm is one module of `BUILTIN_PACKAGE` whose `ALGORITHM` is such a declaration;
the module's name is the algorithm's. To add one, add one file. Such a module imports no torch at
module level, so that a run file can be checked without it.

Owns the form of a declaration and how its values complete a run file. Fields and their bounds are
in `trainer`. Common to all, and the general defaults: AdamW 0.9/0.999 with weight decay 0.01,
gradients clipped to 1.0, no warm-up, 8 samples per task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from penstock.config.base import Contradiction
from penstock.config.builtin_stages import STAGE_FUNCTIONS_MODULE
from penstock.config.rules import RuleConfig
from penstock.plugins import builtin_plugins

if TYPE_CHECKING:
    from penstock.config.trainer import AlgorithmConfig

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


def with_preset(section: object) -> object:
    """The section `algorithm` as written, completed by the defaults of its name."""
    if not isinstance(section, Mapping):
        return section
    written = cast(Mapping[str, Any], section)
    declared = _declared(written)
    return {**declared.preset, **written} if declared else written


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
