# SPDX-License-Identifier: Apache-2.0
"""Settings of a policy that trains an adapter on its frozen model, and what they rule out.

Owns the shape of `models.<policy>.lora`. Which modules a model has is asked when it is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, Field, PositiveInt

from penstock.config.base import Contradiction, KeyPath, Section, matching, non_empty
from penstock.config.engines import serves_adapters

if TYPE_CHECKING:
    from penstock.config.run import RunConfig

_MODULE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_Target = Annotated[
    str, AfterValidator(matching(_MODULE, "write the last part of a module's name, like q_proj"))
]


class LoraConfig(Section):
    """Low-rank matrices beside frozen ones: y = W x + alpha / rank · B A x."""

    rank: PositiveInt = 16
    """Rows of A, columns of B."""
    alpha: PositiveInt = 32
    """The product B A is scaled by alpha / rank."""
    targets: Annotated[tuple[_Target, ...], Field(strict=False), non_empty()] | None = None
    """Linear layers that get an adapter, by the last part of their names, like [q_proj, v_proj];
    null: all of attention and MLP."""


def lora_cross_checks(config: RunConfig) -> Iterator[Contradiction]:
    """What an adapter cannot go with."""
    for name, model in config.models.items():
        if model.lora is None:
            continue
        at: KeyPath = ("models", name, "lora")
        if not serves_adapters(model.engine):
            yield Contradiction(
                text=f"engine {model.engine} does not serve adapters yet; use hf or vllm, or leave "
                "lora out",
                keys=(("models", name, "engine"), at),
            )
        yield from _tensor_parallel_lora(config, name, at)


def _tensor_parallel_lora(config: RunConfig, name: str, at: KeyPath) -> Iterator[Contradiction]:
    """Tensor parallelism cuts the layers that adapters stand beside."""
    own: KeyPath = ("models", name, "training", "parallel", "tp")
    places: list[tuple[KeyPath, int]] = []
    if not (config.pipeline and config.pipeline.stages):
        is_own = config.models[name].training is not None
        where: KeyPath = own if is_own else ("training", "parallel", "tp")
        places = [(where, config.for_policy(name).training.parallel.tp)]
    else:
        places = [
            (("pipeline", "stages", index, "parallel", "tp"), stage.parallel.tp)
            for index, stage in enumerate(config.pipeline.stages)
            if stage.policy in (None, name) and not stage.is_service
        ]
    for place, tp in places:
        if tp > 1:
            yield Contradiction(
                text=f"tp {tp} would cut the layers beside which adapters of {name} stand, which "
                "is not supported yet; set tp: 1 and raise dp, or leave lora out",
                keys=(place, place[:-1], at),
            )
