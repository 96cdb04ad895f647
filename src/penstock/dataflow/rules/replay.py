# SPDX-License-Identifier: Apache-2.0
"""Options that every built-in replay rule has."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PositiveInt

from penstock.dataflow.rules.rule import Rule
from penstock.types import Hook


def _at_least_one_version(value: object) -> object:
    if value == 0 and not isinstance(value, bool):
        raise ValueError(
            "0 would rule out every replay: a trained group is at least 1 version old; "
            "set max_staleness >= 1, or null for the policy's bound"
        )
    return value


class ReplayRule(Rule):
    """Fills part of each batch with groups that were trained before."""

    hook = Hook.REPLAY

    ratio: float = Field(default=0.3, gt=0, lt=1)
    """Share of a batch to replay, in groups, rounded down."""
    max_uses: int = Field(default=4, ge=2)
    """Batches one group may be in, including the first."""
    max_staleness: Annotated[PositiveInt | None, BeforeValidator(_at_least_one_version)] = None
    """Versions a replayed group may be behind; null for the policy's bound."""
