# SPDX-License-Identifier: Apache-2.0
"""Settings of weights on their way from trainers to nodes."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.checks import Section, one_of


class WeightsConfig(Section):
    """How versions are kept and travel."""

    transfer: Annotated[Literal["auto", "delta", "full"], one_of("auto", "delta", "full")] = "auto"
    """What nodes fetch: auto takes what is there sooner by the measured speed of the link, delta
    what changed whenever that is smaller, full always whole files."""
    anchor_every: int = Field(default=25, ge=1, le=32)
    """So many versions apart the store keeps one whole; the others between are made from deltas."""
