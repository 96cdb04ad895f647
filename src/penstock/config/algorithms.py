# SPDX-License-Identifier: Apache-2.0
"""What each algorithm's name stands for, where the file says nothing else.

The one place where a default depends on a name. Owns values only: fields and their bounds are in
`trainer`, the graphs of stages in the trainer's own folder.

Common to all, and the general defaults: AdamW 0.9/0.999 with weight decay 0.01, gradients clipped
to 1.0, no warm-up, 8 samples per task."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from penstock.config.rules import RuleConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Values that hold unless the file gives others."""

    is_group_relative: bool
    """Whether a group of one teaches nothing."""
    algorithm: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the section `algorithm`."""
    minibatches: int = 4
    """Of the section `training`; fewer where a batch has fewer groups."""
    rules: tuple[RuleConfig, ...] = ()
    """Of `dataflow.rules`, in place of the hook's general default."""


_KL = {"beta": 1e-3}

PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(is_group_relative=True, minibatches=1),
    "dr_grpo": Preset(
        is_group_relative=True, algorithm={"aggregation": "fixed-constant"}, minibatches=1
    ),
    "reinforce": Preset(is_group_relative=False, minibatches=1),
    "decoupled": Preset(is_group_relative=True),
    "cispo": Preset(is_group_relative=True, algorithm={"epsilon": 1.0, "epsilon_high": 4.0}),
    "sapo": Preset(is_group_relative=True),
    "ppo": Preset(is_group_relative=False, algorithm=_KL),
    "dapo": Preset(
        is_group_relative=True,
        algorithm={"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.0, "aggregation": "token-mean"},
        rules=(RuleConfig(admit="reward-spread"),),
    ),
    "m2po": Preset(is_group_relative=True, algorithm={**_KL, "tau": 0.01}),
    "gspo": Preset(
        is_group_relative=True,
        algorithm={"epsilon": 3e-4, "epsilon_high": 4e-4, "aggregation": "seq-mean-token-mean"},
    ),
    "rloo": Preset(is_group_relative=True, algorithm=_KL),
    "opd": Preset(is_group_relative=False),
}
"""By `algorithm.name`. grpo, dr_grpo and reinforce are the plain ones, one update per batch."""


def with_preset(section: object) -> object:
    """The section `algorithm` as written, completed by what its name stands for."""
    if not isinstance(section, Mapping):
        return section
    written = cast(Mapping[str, Any], section)
    preset = _preset(written)
    return {**preset.algorithm, **written} if preset else written


def with_minibatches(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The run file as written, its shared training completed by what the algorithm stands for."""
    completed = dict(whole)
    algorithm, training = whole.get("algorithm"), whole.get("training")
    if not isinstance(algorithm, Mapping) or not isinstance(training, Mapping):
        return completed
    written = cast(Mapping[str, Any], training)
    preset = _preset(cast(Mapping[str, Any], algorithm))
    groups = written.get("groups_per_batch", 64)
    if preset and isinstance(groups, int) and groups > 0:
        completed["training"] = {"minibatches": min(preset.minibatches, groups), **written}
    return completed


def _preset(algorithm: Mapping[str, Any]) -> Preset | None:
    name = algorithm.get("name", "grpo")
    return PRESETS.get(name) if isinstance(name, str) else None
