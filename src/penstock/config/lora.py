# SPDX-License-Identifier: Apache-2.0
"""Settings of a policy that trains an adapter on its frozen model, named by layer.

Owns the shape of `models.<policy>.lora`. Which modules a model has is asked when it is loaded."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, PositiveInt

from penstock.config.base import Section, matching, non_empty

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
